"""An inference graph, by generated code or native code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

from aotexport_runtime.engines.candidates import PORTABLE
from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.runs import LIBRARY_FAILED, Engines
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph


class Inference:
    """Runs an inference graph.

    Attributes:
        run: takes the list of inputs, which it empties, and the value of each symbol; replaced by the first call.
    """

    def __init__(self, graph: Graph, environment: Environment, engines: Engines) -> None:
        """Prepare `graph`; its code is compiled at the first call.

        Args:
            graph: a functional graph without gradients.
            environment: namespaces and device.
            engines: engines of the program; they record which has run.
        """
        self._graph = graph
        self._subgraph = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
        self._environment = environment
        self._engines = engines
        self.run: Function = functools.partial(self._first, PORTABLE, self._generated)

    def by_native(self, native: Lowered | Libraries) -> Self:
        """Return the same graph as native code."""
        other = copy.copy(self)
        forward = native.forward if isinstance(native, Lowered) else native.forward(self._subgraph, self._replaced)
        other.run = functools.partial(other._first, native.target, lambda: forward)
        return other

    def _first(
        self, engine: str, make: Callable[[], Function], args: list[Any], symbols: dict[str, int]
    ) -> tuple[Any, ...]:
        self._engines.ran("forward", engine)
        self.run = make()
        return self.run(args, symbols)

    def _replaced(self) -> Function:
        """Return generated code in place of a library that failed."""
        self._engines.ran("forward", PORTABLE, LIBRARY_FAILED)
        return self._generated()

    def _generated(self) -> Function:
        label = self._engines.program
        return compile_functional(self._graph, self._subgraph, self._environment, label=label, detached=True)
