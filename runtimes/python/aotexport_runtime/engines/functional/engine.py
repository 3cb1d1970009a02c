"""The engines of a functional graph with its epilogues: by generated code (`portable`), or by native code.

They serve the calls that the graph was captured for, and native code those that it was compiled for.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Self

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import PORTABLE
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.engines.forward.engine import ForwardEngine
from aotexport_runtime.engines.functional.autograd import apply_joint, run_joint
from aotexport_runtime.engines.functional.checks import InnerOutput, inner_outputs, node_of, remember_versions, watch
from aotexport_runtime.engines.functional.epilogue import Mutations, regenerators
from aotexport_runtime.engines.functional.guards import caller_rows, direct_rows, input_rows, native_rows
from aotexport_runtime.engines.functional.joint import JointProgram, Reference
from aotexport_runtime.engines.runs import LIBRARY_FAILED, Engines
from aotexport_runtime.execution.autocast import device_type_of
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.guards.rule import GuardSource, GuardTable, Row, input_name
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import FunctionalGraph, Program, SizeInput, StateInput
from aotexport_runtime.validate.trees import taken_apart
from aotexport_runtime.values.subclasses import parts


class FunctionalEngine:
    """The functional graph of a program; see `Engine`."""

    def __init__(
        self,
        bundle: Bundle,
        program: Program,
        functional: FunctionalGraph,
        environment: Environment,
        engines: Engines,
        forward: ForwardEngine,
    ) -> None:
        """Prepare generated code; `forward` is for double backward, `engines` records which passes have run."""
        self.name = PORTABLE
        whole, program = program, taken_apart(program)
        graph = bundle.graph(program.name, functional.file)
        self._wraps = any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in whole.inputs)
        self._record = functional
        self._engines = engines
        device_type = device_type_of(program, environment.device)
        self._symbols = [dimension.symbol for dimension in program.dimensions]
        self._caller = caller_rows(whole, functional, device_type)
        self._own = input_rows(program, functional, graph)
        self._counts = len(whole.inputs), len(program.inputs)
        self._mutations = Mutations(functional) if functional.mutations or functional.version_rises else None
        self._checks = functional.gradients is not None and bool(functional.gradients.checks)
        self._regenerators = regenerators(program, functional, graph, environment)
        self._inner: list[InnerOutput] = []
        self._joint: JointProgram | None = None
        self._inference = functools.partial(_inference, graph, environment, engines)
        self._infer = self._inference(None)
        if functional.gradients is not None:
            reference = _reference(forward, whole, environment, apart=self._wraps)
            self._inner = inner_outputs(graph, functional, program)
            self._joint = JointProgram(
                graph,
                functional,
                environment,
                engines,
                reference if program.forward.differentiable else None,
                _parameters(program, bundle.manifest.state),
                self._inner,
            )
        self._guard()

    def by_native(self, native: Native) -> Self:
        """Return the engine of the same graph as native code."""
        engine = copy.copy(self)
        engine.name = native.target
        if self._joint is not None:
            engine._joint = self._joint.by_native(native)
        else:
            engine._infer = self._inference(native)
        gradients = () if self._record.gradients is None else self._record.gradients.of_inputs
        engine._own = [*self._own, *native_rows(native, gradients, self._symbols, self._counts[1])]
        engine._guard()
        return engine

    def _guard(self) -> None:
        whole, apart = self._counts
        self._of_caller = GuardTable([self._caller], whole, known=self._symbols)
        self._of_inputs = GuardTable([self._own], apart, known=self._symbols)
        direct = self._direct
        self.rows: Sequence[Row] = [*self._caller, *self._own, *([] if direct is None else direct_rows(direct.plain))]

    @property
    def _direct(self) -> JointProgram | None:
        """Its joint graph, if the results are the program's outputs; None: there is more to do."""
        if self._mutations or self._regenerators is not None or self._record.grad_mode is not None:
            return None
        if self._checks or self._inner or self._joint is None:
            return None
        return None if self._joint.gradients.detached_inputs else self._joint

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return why the graph does not serve this call; None: it does."""
        reason = self._of_caller.first(inputs, symbols)
        if reason is not None:
            return reason
        return self._of_inputs.first(_apart(inputs) if self._wraps else inputs, symbols)

    def expression(self, source: GuardSource) -> str | None:
        """Return source that runs the joint graph, if there is nothing else to do."""
        if self._direct is None:
            return None
        symbols = source.values_of(self._symbols)
        inputs = ", ".join(map(input_name, range(self._counts[0])))
        return f"{source.constant(apply_joint)}({source.constant(self._direct)}, {symbols}, {inputs})"

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> Sequence[Any]:
        """Run the graph and its epilogues; see `Engine`."""
        if because:
            self._engines.ran("forward", self.name, because)
        if self._wraps:
            inputs = _apart(inputs)
        if self._joint is not None:
            returned = run_joint(self._joint, inputs, symbols)
        else:
            returned = _unrecorded(self._infer, inputs, symbols)
        results = returned
        if self._mutations is not None:
            self._mutations.apply(inputs, returned)
            returned = returned[self._mutations.count :]
        node = node_of(results) if self._checks or self._inner else None
        if self._regenerators is None:
            outputs = returned
        else:
            outputs = list(returned[: len(self._record.outputs)])
            for index, make in self._regenerators:
                outputs[index] = make(inputs, returned, outputs)
        if node is not None:
            remember_versions(node, inputs, outputs)
            watch(node, self._inner, outputs)
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
