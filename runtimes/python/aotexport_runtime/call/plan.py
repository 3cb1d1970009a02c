"""The whole of a call, link by link.

    bind and flatten -> hard guards -> state -> choose a graph -> run -> mutations -> aliases -> grad mode -> unflatten

The functional graph serves the calls that it was captured for. The forward graph under eager autograd, which is the
program's meaning, serves every other call that the hard guards admit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.fast_path import FastPath
from aotexport_runtime.engines.candidates import AUTOGRAD, PORTABLE
from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.engines.forward.live_graph import LiveGraph
from aotexport_runtime.engines.functional.aliases import regenerators
from aotexport_runtime.engines.functional.autograd import run_joint
from aotexport_runtime.engines.functional.guards import CALLER, INPUTS, Functional
from aotexport_runtime.engines.functional.inference import Inference
from aotexport_runtime.engines.functional.inner import InnerOutput, inner_outputs, watch
from aotexport_runtime.engines.functional.joint import JointProgram
from aotexport_runtime.engines.functional.mutations import Mutations
from aotexport_runtime.engines.functional.versions import node_of, remember_versions
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.runs import WHOLE, Engines
from aotexport_runtime.errors import CallInvalid, NotSupported
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import device_type_of
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph, constant_value
from aotexport_runtime.execution.higher_order import EFFECTS, restored_on_error
from aotexport_runtime.guards.arguments import ARGUMENTS
from aotexport_runtime.guards.caller import MODES, STATE, Caller
from aotexport_runtime.guards.containers import ContainerChanges
from aotexport_runtime.guards.kinds import torch_tensors
from aotexport_runtime.guards.rule import Row, rows
from aotexport_runtime.guards.signature import Bound, Signature
from aotexport_runtime.guards.subjects import ArgumentFacts
from aotexport_runtime.guards.table import GuardTable
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import FunctionalGraph, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.submodules.places import StateSlot
from aotexport_runtime.submodules.tables import put_quietly
from aotexport_runtime.validate.subclasses import taken_apart
from aotexport_runtime.values.subclasses import parts
from aotexport_runtime.values.trees import builder

_UNREAD: StateSlot = ({"": torch.empty(0)}, "")
"""Slot of a state tensor that no node reads."""


class Plan:
    """A program, ready to be called."""

    def __init__(
        self,
        bundle: Bundle,
        program: Program,
        slot: Callable[[str], StateSlot],
        environment: Environment,
        *,
        engines: Engines,
        native: Lowered | Libraries | None = None,
        live: LiveGraph | None = None,
    ) -> None:
        """Compose the chain of `program`.

        Args:
            bundle: where its graphs are.
            program: its record.
            slot: returns the slot of a state tensor's current value, by name.
            environment: namespaces and device.
            engines: engines that serve; they record which passes have run.
            native: the functional graph as native code, for the calls that it serves; None: there is none.
            live: the forward graph with changed submodules, which serves every call; None: the program calls none.
        """
        self.program = program
        self.engines = engines
        self.bundle = bundle
        self._live = live
        self.environment = environment

        def constant(leaf: Constant) -> Any:
            return constant_value(leaf.value, environment)

        changed = [change.path for change in program.container_changes]
        self._signature = Signature(program.parameters, constant, changed)
        self._container_changes = ContainerChanges(program.container_changes, constant)
        self._rebinds = [(rebind.output_index, *slot(rebind.name)) for rebind in program.rebinds]
        self._unflatten = builder(program.output_tree, constant)
        self.guards = GuardTable(self._guards(slot), len(program.inputs), torch_tensors())
        self._forward: Function | None = None
        self._has_effects = False
        self._functional = None
        if PORTABLE in engines.serving:
            assert program.functional is not None
            self._functional = _Functional(self, program.functional, native)
        functional = self._functional
        self.fast_path = FastPath(
            program=program,
            signature=self._signature,
            rows=self.guards.rows if functional is None else [*self.guards.rows, *functional.rows],
            joint=None if functional is None else functional.direct,
            serve=self._serve,
            unflatten=self._unflatten,
            fallback=self._check_and_run,
        )
        """Serves the usual calls."""
        self.call = self.fast_path.function()
        """`__call__`, without this detour."""

    def _guards(self, slot: Callable[[str], StateSlot]) -> list[list[Row]]:
        """Return the guards of the program, in the stages in which a call passes them."""
        program, environment = self.program, self.environment
        forms = {
            index: environment.form(spec.subclass)
            for index, spec in enumerate(program.inputs)
            if not isinstance(spec, SizeInput) and spec.subclass is not None
        }
        reads = self._reads()
        state = [
            (index, *(slot(spec.name) if index in reads else _UNREAD))
            for index, spec in enumerate(program.inputs)
            if isinstance(spec, StateInput)
        ]
        used = {spec.name for i, spec in enumerate(program.inputs) if isinstance(spec, StateInput) and i in reads}
        ties = [
            (slot(entry.name), [slot(name) for name in entry.tied], entry)
            for entry in self.bundle.manifest.state
            if entry.tied and entry.name in used and entry.role != "constant"
        ]
        caller = Caller(
            program=program,
            device_type=device_type_of(program, environment.device),
            state=state,
            ties=ties,
            forms={index: form for index, form in forms.items() if index in reads},
            added=() if self._live is None else self._live.added,
        )
        devices = () if environment.device is None else (environment.device.type,)
        first = rows(ARGUMENTS, ArgumentFacts(program=program, device_types=devices, forms=forms))
        first += rows(MODES, caller, after=first)
        return [first, rows(STATE, caller, after=first)]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program.

        Raises:
            CallInvalid: the call does not fit; lists every violation.
        """
        return self.call(args, kwargs)

    def _check_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.bind(args, kwargs)
        if call.violations:
            raise CallInvalid(self.program.name, call.violations)
        return self.run(call)

    def _serve(self, inputs: list[Any], symbols: dict[str, int]) -> Any:
        """Run the program by its functional graph, which serves the call, if it has one."""
        if self._functional is None:
            return self._returned(self.run_forward(inputs, symbols))
        return self._returned(self._functional.run(inputs, symbols))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the call with the graphs' inputs; its violations are those of hard guards."""
        inputs: list[Any] = [None] * len(self.program.inputs)
        containers: dict[str, Any] = {}
        violations = self._signature.flatten(args, kwargs, inputs, containers)
        if violations:
            return Bound(inputs, {}, violations, {})
        symbols: dict[str, int] = {}
        violations = self.guards.check(inputs, symbols)
        return Bound(inputs, symbols, violations, containers)

    def run(self, call: Bound) -> Any:
        """Run the program on a call without violations; return the call's result."""
        inputs, symbols = call.inputs, call.symbols
        functional = self._functional
        if functional is not None and functional.why_not(inputs, symbols) is None:
            outputs = functional.run(inputs, symbols)
        else:
            outputs = self.run_forward(inputs, symbols)
        self._container_changes.apply(call.containers, outputs)
        return self._returned(outputs)

    def _returned(self, outputs: Any) -> Any:
        """Put the tensors that the call replaces into the module; return the call's result."""
        for index, table, key in self._rebinds:
            put_quietly(table, key, outputs[index])
        return self._unflatten(outputs)

    def _reads(self) -> set[int]:
        """Return the inputs that the program itself reads; changed submodules read their own state."""
        if self._live is None:
            return set(range(len(self.program.inputs)))
        asked = {index for question in self.program.questions for index in question.inputs}
        return asked | {i for i, value in enumerate(self._live.graph.inputs) if value.name in self._live.reads}

    def run_forward(self, inputs: list[Any], symbols: dict[str, int]) -> Any:
        """Run the forward graph under the caller's grad mode; return the outputs."""
        forward = self.program.forward
        if not forward.differentiable and (_records(inputs) or transforms.forward_mode()):
            raise NotSupported(
                f"this call of program `{self.program.name}` needs the forward graph under autograd, and the module's "
                "custom autograd functions are only in its joint graph. "
                f"{self._way_out(inputs, symbols)}"
            )
        if self._forward is None:
            because = "" if self._functional is None else self._why_not(inputs, symbols)
            self.engines.ran(WHOLE if _records(inputs) else "forward", AUTOGRAD, because)
            live = self._live
            graph = self.bundle.graph(self.program.name, forward.file) if live is None else live.graph
            environment = self.environment if live is None else live.environment
            names = [graph_input.name for graph_input in graph.inputs]
            self._forward = compile_graph(
                graph, graph.nodes, names, graph.outputs, environment, label=f"{self.program.name} forward graph"
            )
            self._has_effects = any(node.op in EFFECTS for node in graph.nodes)
        if not self._has_effects:
            return self._forward(inputs, symbols)
        with restored_on_error():
            return self._forward(inputs, symbols)

    def _way_out(self, inputs: list[Any], symbols: dict[str, int]) -> str:
        """Return what to do about a call that only a joint graph could serve, or why it does not."""
        if not self.program.grad and torch.is_grad_enabled():
            return (
                "The program is for calls without gradients: call it under `torch.no_grad()`, or export one with "
                "gradients in eval mode too (`eval-joint`)"
            )
        if self._functional is None and self.program.functional is not None:
            return "The bundle was loaded without it: load it with target='auto'"
        return f"Reason: {self._why_not(inputs, symbols)}"

    def _why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str:
        if self._functional is None:
            return "; ".join(refusal.reason for refusal in self.program.refusals) or "the program has no joint graph"
        return self._functional.why_not(inputs, symbols) or "a backward is differentiated again"


class _Functional:
    """The functional graph of a program with its epilogues."""

    def __init__(self, plan: Plan, functional: FunctionalGraph, native: Lowered | Libraries | None) -> None:
        program = taken_apart(plan.program)
        graph = plan.bundle.graph(program.name, functional.file)
        self._wraps = any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in plan.program.inputs)
        self._record = functional
        device_type = device_type_of(program, plan.environment.device)
        symbols = [dimension.symbol for dimension in program.dimensions]
        caller = rows(CALLER, Functional(plan.program, functional, graph, device_type))
        inputs = rows(INPUTS, Functional(program, functional, graph, device_type))
        self.rows = [*caller, *inputs]
        """Guards of the calls that it serves."""
        self._caller = GuardTable([caller], len(plan.program.inputs), known=symbols)
        self._inputs = GuardTable([inputs], len(program.inputs), known=symbols)
        self._mutations = Mutations(functional) if functional.mutations or functional.version_rises else None
        self._checks = functional.gradients is not None and bool(functional.gradients.checks)
        self._regenerators = regenerators(program, functional, graph, plan.environment)
        self._inner: list[InnerOutput] = []
        self._joint = None
        self._inference = None
        if functional.gradients is not None:
            by_forward_graph = _put_together(plan) if self._wraps else plan.run_forward
            reference = by_forward_graph if program.forward.differentiable else None
            self._inner = inner_outputs(graph, functional, program)
            self._joint = JointProgram(
                graph,
                functional,
                plan.environment,
                plan.engines,
                reference,
                native,
                _parameters(program, plan.bundle.manifest.state),
                self._inner,
            )
        else:
            self._inference = Inference(graph, plan.environment, plan.engines, native)
        fresh = self._mutations is None and self._regenerators is None and functional.grad_mode is None
        fresh = fresh and not self._checks and not self._inner
        alone = fresh and not program.rebinds and self._joint is not None and not self._joint.gradients.detached_inputs
        self.direct = self._joint if alone else None
        """Its joint graph, if its results are the program's outputs; else None."""

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return why the functional graph does not serve this call; None: it does."""
        reason = self._caller.first(inputs, symbols)
        if reason is not None:
            return reason
        return self._inputs.first(_apart(inputs) if self._wraps else inputs, symbols)

    def run(self, inputs: list[Any], symbols: dict[str, int]) -> Any:
        """Run the graph and its epilogues; return the outputs."""
        if self._wraps:
            inputs = _apart(inputs)
        if self._joint is not None:
            returned = run_joint(self._joint, inputs, symbols)
        else:
            assert self._inference is not None
            run = self._inference.run
            returned = run(list(inputs), symbols) if not torch.is_grad_enabled() else _unrecorded(run, inputs, symbols)
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
        if node is not None and self._checks:
            remember_versions(node, inputs, outputs)
        if node is not None and self._inner:
            watch(node, self._inner, outputs)
        if self._record.grad_mode is not None:
            torch.set_grad_enabled(self._record.grad_mode)
        return outputs


def _unrecorded(run: Function, inputs: Sequence[Any], symbols: dict[str, int]) -> Sequence[Any]:
    with torch.no_grad():
        return run(list(inputs), symbols)


def _parameters(program: Program, state: Sequence[StateTensor]) -> set[int]:
    """Return the inputs of `program` that are parameters."""
    names = {entry.name for entry in state if entry.role == "parameter" and entry.subclass is None}
    return {i for i, spec in enumerate(program.inputs) if isinstance(spec, StateInput) and spec.name in names}


def _apart(inputs: list[Any]) -> list[Any]:
    """Return the inputs with tensor subclasses replaced by their parts."""
    return [part for value in inputs for part in (parts(value) if isinstance(value, torch.Tensor) else (value,))]


def _put_together(plan: Plan) -> Callable[[list[Any], dict[str, int]], Any]:
    """Return a function that runs the forward graph on inputs that were taken apart."""
    records = [None if isinstance(spec, SizeInput) else spec.subclass for spec in plan.program.inputs]
    forms = [None if record is None else plan.environment.form(record) for record in records]

    def run(apart: list[Any], symbols: dict[str, int]) -> Any:
        remaining = iter(apart)
        inputs = [next(remaining) if form is None else form.make(remaining, symbols) for form in forms]
        return plan.run_forward(inputs, symbols)

    return run


def _records(inputs: Sequence[Any]) -> bool:
    """Return whether autograd records operations on these inputs."""
    return torch.is_grad_enabled() and any(map(_requires_grad, inputs))


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
