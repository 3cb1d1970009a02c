"""The engine `autograd`: the forward graph under eager autograd, which serves every call that fits the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import AUTOGRAD, PORTABLE
from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.engines.runs import WHOLE, Engines
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import OPTIMIZER, STEP
from aotexport_runtime.schema.program import Program

if TYPE_CHECKING:
    from aotexport_runtime.engines.forward.live_graph import LiveGraph


class ForwardEngine(Engine):
    """The forward graph of a program; see `Engine`."""

    name = AUTOGRAD

    def __init__(
        self, bundle: Bundle, program: Program, environment: Environment, engines: Engines, live: LiveGraph | None
    ) -> None:
        """Prepare the graph, which the first call compiles; `live`, with changed submodules, runs in its place."""
        self._bundle = bundle
        self._program = program
        self._environment = environment
        self._engines = engines
        self._live = live
        self._compiled: Function | None = None
        self._restored: Callable[[], AbstractContextManager[None]] | None = None

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> Sequence[Any]:
        """Run the graph under the caller's grad mode; see `Engine`.

        Raises:
            NotSupported: gradients are recorded, and the graph has custom autograd functions without their backward.
        """
        if not self._program.forward.differentiable and (_records(inputs) or transforms.forward_mode()):
            raise NotSupported(
                f"this call of program `{self._program.name}` needs the forward graph under autograd, and the module's "
                f"custom autograd functions are only in its joint graph. {self._way_out(because)}"
            )
        if self._compiled is None:
            self._engines.ran(WHOLE if _records(inputs) else "forward", AUTOGRAD, because)
            self._compiled = self._compile()
        if self._restored is None:
            return self._compiled(inputs, symbols)
        with self._restored():
            return self._compiled(inputs, symbols)

    @property
    def graph(self) -> Graph:
        """The graph that runs."""
        live = self._live
        return self._bundle.graph(self._program.name, self._program.forward.file) if live is None else live.graph

    @property
    def environment(self) -> Environment:
        """The environment of the graph that runs."""
        return self._environment if self._live is None else self._live.environment

    def _compile(self) -> Function:
        graph, environment = self.graph, self.environment
        if any(node.op.startswith("torch::") for node in graph.nodes):
            from aotexport_runtime.execution.higher_order import restored_on_error

            self._restored = restored_on_error
        names = [graph_input.name for graph_input in graph.inputs]
        label = f"{self._program.name} forward graph"
        if self._program.name == STEP and OPTIMIZER in self._bundle.manifest.extensions:
            from aotexport_runtime.execution.functional_graph import compile_functional
            from aotexport_runtime.rewrite.recompute import computed_again
            from aotexport_runtime.rewrite.updates import with_fused_updates

            nodes = computed_again(with_fused_updates(graph), str(graph.outputs[0]))
            return compile_functional(graph, Subgraph(names, nodes, graph.outputs), environment, label=label)
        return compile_graph(graph, graph.nodes, names, graph.outputs, environment, label=label)

    def _way_out(self, because: str) -> str:
        """Return what to do about a call that only a joint graph could serve, or why it does not."""
        program = self._program
        if not program.grad and torch.is_grad_enabled():
            return (
                "The program is for calls without gradients: call it under `torch.no_grad()`, or export one with "
                "gradients in eval mode too (`eval-joint`)"
            )
        if program.functional is not None and PORTABLE not in self._engines.engines:
            return "The bundle was loaded without it: load it with target='auto'"
        refusals = "; ".join(refusal.reason for refusal in program.refusals) or "the program has no joint graph"
        return f"Reason: {because or refusals}"


def _records(inputs: Sequence[Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
