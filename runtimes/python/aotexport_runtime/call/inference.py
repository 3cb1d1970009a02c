"""An inference graph, run by its lowered form or its library where that serves the call, else by generated code."""

from __future__ import annotations

import functools
from typing import Any

from aotexport_runtime.call.engines import LIBRARY_FAILED, PORTABLE, Engines
from aotexport_runtime.engines.codegen import Environment, Function
from aotexport_runtime.engines.cpu import Libraries
from aotexport_runtime.engines.functional import compile_functional
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.partition import StraightLine
from aotexport_runtime.schema.graph import Graph


class Inference:
    """Runs an inference graph.

    Attributes:
        run: takes the inputs, which it empties, and the value of each symbol; another after the first call.
    """

    def __init__(
        self,
        graph: Graph,
        environment: Environment,
        engines: Engines,
        lowered: Lowered | None,
        libraries: Libraries | None,
    ) -> None:
        """Prepare `graph`; what runs it is compiled at the first call.

        Args:
            graph: a functional graph without gradients.
            environment: namespaces and device.
            engines: of the program; told of each that runs.
            lowered: a faster form of the graph; None: there is none.
            libraries: the graph, compiled; None: it is not.
        """
        self._graph = graph
        self._line = StraightLine([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
        self._environment = environment
        self._engines = engines
        self._ran = False
        self.run: Function = self._first
        if lowered is not None:
            self.run = functools.partial(self._by_kernels, lowered)
        elif libraries is not None:
            self.run = functools.partial(
                self._by_library, libraries, libraries.forward(self._line, self._where_library_fails)
            )

    def _first(self, args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        self._engines.ran("forward", PORTABLE)
        self.run = self._portable
        return self.run(args, symbols)

    def _by_kernels(self, lowered: Lowered, args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        if not lowered.serves(args, symbols):
            self._engines.ran("forward", PORTABLE, lowered.why_not(symbols))
            return self._portable(args, symbols)
        if not self._ran:
            self._engines.ran("forward", lowered.target)
            self._ran = True
        return lowered.forward(args, symbols)

    def _by_library(
        self, libraries: Libraries, compiled: Function, args: list[Any], symbols: dict[str, int]
    ) -> tuple[Any, ...]:
        if not libraries.serves(symbols):
            self._engines.ran("forward", PORTABLE, libraries.why_not(symbols))
            return self._portable(args, symbols)
        if not self._ran:
            self._engines.ran("forward", libraries.target)
            self._ran = True
        return compiled(args, symbols)

    def _where_library_fails(self) -> Function:
        self._engines.ran("forward", PORTABLE, LIBRARY_FAILED)
        return self._portable

    @functools.cached_property
    def _portable(self) -> Function:
        label = self._engines.program
        return compile_functional(self._graph, self._line, self._environment, label=label, detached=True)
