"""The engines of a functional graph with its epilogues: by generated code (`portable`), or by native code.

They serve the calls that the graph was captured for, and native code those that it was compiled for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import PORTABLE
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.engines.forward.engine import ForwardEngine
from aotexport_runtime.engines.functional.autograd import apply_joint, node_of, remember, run_joint
from aotexport_runtime.engines.functional.epilogue import Mutations, regenerators
from aotexport_runtime.engines.functional.guards import caller_rows, direct_rows, input_rows, native_rows
from aotexport_runtime.engines.functional.joint import JointProgram, Reference
from aotexport_runtime.engines.functional.tangents import inner_outputs
from aotexport_runtime.engines.runs import LIBRARY_FAILED, Engines
from aotexport_runtime.execution.autocast import device_type_of
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.guards.rule import GuardSource, GuardTable, Row, input_name
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.validate.trees import taken_apart
from aotexport_runtime.values.subclasses import parts


class FunctionalEngine:
    """The functional graph of a program; see `Engine`."""

    def __init__(
        self,
        bundle: Bundle,
        program: Program,
        environment: Environment,
        engines: Engines,
        forward: ForwardEngine,
        native: Native | None = None,
    ) -> None:
        """Prepare code, generated or native; `forward` is for double backward, `engines` records passes that ran."""
        functional = program.functional
        assert functional is not None
        self.name = PORTABLE if native is None else native.target
        self.by_native = functools.partial(FunctionalEngine, bundle, program, environment, engines, forward)
        """Returns the engine of the same graph as native code."""
        whole, program = program, taken_apart(program)
        graph = bundle.graph(program.name, functional.file)
        self._wraps = any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in whole.inputs)
        self._record = functional
        self._engines = engines
        self._symbols = [dimension.symbol for dimension in program.dimensions]
        self._mutations = Mutations(functional) if functional.mutations or functional.version_rises else None
        self._regenerators = regenerators(program, functional, graph, environment)
        gradients = functional.gradients
        self._joint: JointProgram | None = None
        if gradients is None:
            self.infer = _inference(graph, environment, engines, native)  # pyrefly: ignore[possibly-uninitialized-attribute]
        else:
            self._joint = JointProgram(
                graph,
                functional,
                environment,
                engines,
                _reference(forward, whole, environment, apart=self._wraps) if program.forward.differentiable else None,
                _parameters(program, bundle.manifest.state),
                inner_outputs(graph, functional, program),
                native,
            )
        caller = caller_rows(whole, functional, device_type_of(program, environment.device))
        own = input_rows(program, functional, graph, holds_state=native is not None and native.holds_state)
        if native is not None:
            of_inputs = () if gradients is None else gradients.of_inputs
            own += native_rows(native, of_inputs, self._symbols, len(program.inputs))
        self._count = len(whole.inputs)
        self._of_caller = GuardTable([caller], self._count, known=self._symbols)
        self._of_inputs = GuardTable([own], len(program.inputs), known=self._symbols)
        self._checks = self._joint is not None and self._joint.checks
        more = self._mutations or self._regenerators is not None or functional.grad_mode is not None or self._checks
        # The graph's results are then the program's outputs, by the function that runs it alone.
        alone = None if more or self._wraps or gradients is not None else native
        self._is_native = alone is not None and alone.is_detached
        self._is_held = alone is not None and alone.is_held is not None
        self._arguments = [i for i, spec in enumerate(whole.inputs) if not isinstance(spec, StateInput)]
        is_direct = not more and gradients is not None and not gradients.detached_inputs
        # Its joint graph, if the results are the program's outputs.
        self._direct = self._joint if is_direct else None
        self.rows: Sequence[Row] = [*caller, *own, *(() if self._direct is None else direct_rows(self._direct.plain))]

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return why the graph does not serve this call; None: it does."""
        reason = self._of_caller.first(inputs, symbols)
        if reason is not None:
            return reason
        return self._of_inputs.first(_apart(inputs) if self._wraps else inputs, symbols)

    def expression(self, source: GuardSource) -> str | None:
        """Return source that runs the joint graph, or native code, if there is nothing else to do."""
        symbols = source.values_of(self._symbols)
        inputs = ", ".join(map(input_name, range(self._count)))
        if self._is_native:
            return f"{source.constant(self.infer)}([{inputs}], {symbols})"
        if self._direct is None:
            return None
        return f"{source.constant(apply_joint)}({source.constant(self._direct)}, {symbols}, {inputs})"

    def held_expression(self, source: GuardSource) -> str | None:
        """Return source that runs native code over arguments alone, if there is nothing else to do."""
        if not self._is_held:
            return None
        others = [*itertools.pairwise((-1, *self._arguments, self._count))]
        gaps = [f"*{source.constant((None,) * (end - begin - 1))}" if end - begin > 1 else "" for begin, end in others]
        taken = [*chain(*zip(gaps, [*map(input_name, self._arguments), ""], strict=True))]
        inputs = ", ".join(filter(None, taken))
        return f"{source.constant(self.infer)}([{inputs}], {source.values_of(self._symbols)})"

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> Sequence[Any]:
        """Run the graph and its epilogues; see `Engine`."""
        if because:
            self._engines.ran("forward", self.name, because)
        if self._wraps:
            inputs = _apart(inputs)
        if self._joint is not None:
            returned = run_joint(self._joint, inputs, symbols)
        else:
            returned = _unrecorded(self.infer, inputs, symbols)
        results = returned
        if self._mutations is not None:
            self._mutations.apply(inputs, returned)
            returned = returned[self._mutations.count :]
        node = node_of(results) if self._checks else None
        if self._regenerators is None:
            outputs = returned
        else:
            outputs = list(returned[: len(self._record.outputs)])
            for index, make in self._regenerators:
                outputs[index] = make(inputs, returned, outputs)
        if node is not None:
            remember(node, inputs, outputs)
        if self._record.grad_mode is not None:
            torch.set_grad_enabled(self._record.grad_mode)
        return outputs


def _unrecorded(infer: Function, inputs: Sequence[Any], symbols: dict[str, int]) -> Sequence[Any]:
    if not torch.is_grad_enabled():
        return infer(list(inputs), symbols)
    with torch.no_grad():
        return infer(list(inputs), symbols)


def _inference(graph: Graph, environment: Environment, engines: Engines, native: Native | None) -> Function:
    """Return a function that runs an inference graph, compiled by its first call, or native code of it."""
    piece = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)

    def generated() -> Function:
        return compile_functional(graph, piece, environment, label=engines.program, detached=True)

    def replaced() -> Function:
        engines.ran("forward", PORTABLE, LIBRARY_FAILED)
        return generated()

    found = None if native is None else native.forward_of(piece, replaced)

    @functools.cache
    def first() -> Function:
        engines.ran("forward", PORTABLE if native is None else native.target)
        return generated() if found is None else found

    return lambda args, symbols: first()(args, symbols)


def _parameters(program: Program, state: Sequence[StateTensor]) -> set[int]:
    names = {entry.name for entry in state if entry.role == "parameter" and entry.subclass is None}
    return {i for i, spec in enumerate(program.inputs) if isinstance(spec, StateInput) and spec.name in names}


def _apart(inputs: list[Any]) -> list[Any]:
    """Return the inputs with tensor subclasses replaced by their parts."""
    return [part for value in inputs for part in (parts(value) if isinstance(value, torch.Tensor) else (value,))]


def _reference(forward: ForwardEngine, program: Program, environment: Environment, *, apart: bool) -> Reference:
    """Return a function that runs the forward graph on the inputs of a joint graph; `apart`: taken apart."""
    records = [None if isinstance(spec, SizeInput) else spec.subclass for spec in program.inputs] if apart else []
    forms = [None if record is None else environment.form(record) for record in records]

    def run(inputs: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        if forms:
            remaining = iter(inputs)
            inputs = [next(remaining) if form is None else form.make(remaining, symbols) for form in forms]
        return forward.run(inputs, symbols, "a backward is differentiated again")

    return run
