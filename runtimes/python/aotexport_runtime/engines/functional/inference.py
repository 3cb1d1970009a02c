"""An inference graph: its lowered form or library runs the calls that it serves, generated code the others."""

from __future__ import annotations

import functools
from typing import Any

from aotexport_runtime.engines.candidates import PORTABLE, CallFacts
from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.runs import LIBRARY_FAILED, Engines
from aotexport_runtime.engines.select import obstacle
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph


class Inference:
    """Runs an inference graph.

    Attributes:
        run: takes the list of inputs, which it empties, and the value of each symbol; replaced by the first call.
    """

    def __init__(
        self,
        graph: Graph,
        environment: Environment,
        engines: Engines,
        native: Lowered | Libraries | None,
    ) -> None:
        """Prepare `graph`; generated code is compiled at the first call.

        Args:
            graph: a functional graph without gradients.
            environment: namespaces and device.
            engines: engines of the program; they record which has run.
            native: the graph as native code; None: there is none.
        """
        self._graph = graph
        self._subgraph = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
        self._environment = environment
        self._engines = engines
        self._ran = False
        self.run: Function = self._first
        if isinstance(native, Lowered):
            self.run = functools.partial(self._by_native, native, native.forward)
        elif native is not None:
            self.run = functools.partial(
                self._by_native, native, native.forward(self._subgraph, self._where_library_fails)
            )

    def _first(self, args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        self._engines.ran("forward", PORTABLE)
        self.run = self._portable
        return self.run(args, symbols)

    def _by_native(
        self, native: Lowered | Libraries, forward: Function, args: list[Any], symbols: dict[str, int]
    ) -> tuple[Any, ...]:
        call = CallFacts(native, args, symbols)
        rule = obstacle(call)
        if rule is not None:
            self._engines.ran("forward", PORTABLE, rule.reason.format(call))
            return self._portable(args, symbols)
        if not self._ran:
            self._engines.ran("forward", native.target)
            self._ran = True
        return forward(args, symbols)

    def _where_library_fails(self) -> Function:
        self._engines.ran("forward", PORTABLE, LIBRARY_FAILED)
        return self._portable

    @functools.cached_property
    def _portable(self) -> Function:
        label = self._engines.program
        return compile_functional(self._graph, self._subgraph, self._environment, label=label, detached=True)
