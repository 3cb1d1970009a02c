"""The `cpu` engine: functional graphs, whole or partitioned, as shared libraries.

A library computes the same values as the generated code of the `portable` engine, so that everything around it (saved
values, epilogues, hooks) is the same. Calls that it was not compiled for run the generated code.
"""

from __future__ import annotations

import functools
import logging
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.cpu.library import Library
from aotexport_runtime.errors import BundleInvalid, first_line
from aotexport_runtime.execution.codegen import (
    Environment,
    Function,
    constant_value,
    is_profiled,
    marked,
    without_base,
)
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.compiled import CompiledHalf, CpuRequirements
from aotexport_runtime.schema.gradients import Partition
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.values import Argument, SizeArgument, SizeMeta
from aotexport_runtime.values import sizes

log = logging.getLogger("aotexport_runtime")

_CAPABILITIES = {"x86_64-v3": ("AVX2", "AVX512"), "x86_64-v4": ("AVX512",)}
"""Torch's names of processors that have a level."""


def unfit(requirements: CpuRequirements) -> str | None:
    """Return why this machine cannot run libraries with these requirements; None: it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    series = ".".join(torch.__version__.split(".")[:2])
    if series != requirements.torch:
        return f"it is for torch {requirements.torch}, and this is torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(_CAPABILITIES[requirements.level]):
        return f"it is for processors of level {requirements.level}, and torch sees one with {capability}"
    return None


class Libraries:
    """The libraries of one program."""

    def __init__(self, bundle: Bundle, target: str, program: Program, environment: Environment) -> None:
        """Load the libraries of `program` for a `cpu` target that has it, after comparing their digests.

        Raises:
            BundleInvalid: the digest of the record or a library differs from the manifest's.
            NotSupported: a library cannot be loaded here.
        """
        compiled = bundle.compiled(target, program.name)
        assert compiled is not None
        assert program.functional is not None
        self.target = target
        """Name of the target."""
        self._compiled = compiled
        self._environment = environment
        self._graph = bundle.graph(program.name, program.functional.file)
        self._program = program
        self._symbols = [dimension.symbol for dimension in program.dimensions]
        self._where = f"targets/{target}/target.json"
        libraries = [each for each in (compiled.forward, compiled.backward) if each is not None]
        paths = {library.file: bundle.intact_file(f"targets/{target}/{library.file}") for library in libraries}
        self._libraries = {file: Library(path, environment.matmul) for file, path in paths.items()}
        gradients = program.functional.gradients
        partitions: tuple[Partition, ...] = () if gradients is None else gradients.partitions
        self.partition = next((p for p in partitions if p.name == compiled.partition), None)
        """Partition of the joint graph; None: it is an inference graph."""

    def why_not(self, symbols: Mapping[str, int]) -> str:
        """Return why `serves` is False for a call with these sizes."""
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        names = {dimension.symbol: dimension.name for dimension in self._program.dimensions}
        unmet = [guard for guard in self._compiled.guards if not sizes.evaluate(guard, symbols)]
        return f"libraries are for {' and '.join(sizes.describe(guard, names).strip('()') for guard in unmet)}"

    @property
    def taken(self) -> str:
        """The backward passes that the backward library is for, in words."""
        from_ = "the loss alone" if self._compiled.undefined_tangents else "every output"
        return f"the library is for a backward pass from {from_}"

    def takes(self, defined: Sequence[bool]) -> bool:
        """Return whether the backward library is for a pass in which these tangents are defined."""
        undefined = self._compiled.undefined_tangents
        return all(is_defined == (index not in undefined) for index, is_defined in enumerate(defined))

    def serves(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> bool:
        """Return whether the libraries are right for a call with these sizes; the inputs do not matter."""
        if torch.are_deterministic_algorithms_enabled():
            return False
        return all(sizes.evaluate(guard, symbols) for guard in self._compiled.guards)

    def forward(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        """Return a function that runs `subgraph`, the forward; where the library fails, `fallback` makes another."""
        return self._function(self._compiled.forward, subgraph, fallback)

    def backward(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        """Return a function that runs `subgraph`, the backward; where the library fails, `fallback` makes another."""
        assert self._compiled.backward is not None
        return self._function(self._compiled.backward, subgraph, fallback)

    def _function(self, library: CompiledHalf, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        taken = {name: index for index, name in enumerate(subgraph.inputs)}
        for name in library.inputs:
            if name not in taken:
                raise BundleInvalid(
                    f"library {library.file!r} takes {name[:80]!r}, which is no input",
                    where=self._where,
                    check="target-malformed/library-input",
                )
        inputs = [taken[name] for name in library.inputs]
        places = _places(subgraph, library, self._graph, self._where)
        runner, symbols_taken, environment = self._libraries[library.file], self._symbols, self._environment
        portable = functools.cache(fallback)

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            tensors = [args[index] for index in inputs]
            if symbols_taken:
                # A tensor without elements tells the library the sizes.
                tensors.insert(0, torch.empty([*[symbols[symbol] for symbol in symbols_taken], 0]))
            try:
                results = marked(library.file, runner.run, tensors) if is_profiled() else runner.run(tensors)
            except RuntimeError as error:
                log.warning("library %s failed, and the graph runs instead: %s", library.file, first_line(error))
                return portable()(args, symbols)
            if library.indexes and results.pop().item():
                # Operators of torch raise eager's error.
                return portable()(args, symbols)
            results += args
            args.clear()
            return tuple(
                [without_base(results[p]) if type(p) is int else _computed(p, symbols, environment) for p in places]
            )

        return call


class _Other:
    """An output of a subgraph that is no tensor of the library."""

    def __init__(self, argument: Argument) -> None:
        self.argument = argument


def _computed(place: int | _Other, symbols: Mapping[str, int], environment: Environment) -> Any:
    assert isinstance(place, _Other)
    if isinstance(place.argument, SizeArgument):
        return sizes.evaluate(place.argument.value, symbols)
    return constant_value(place.argument, environment)


def _places(subgraph: Subgraph, library: CompiledHalf, graph: Graph, where: str) -> list[int | _Other]:
    """Return the place of each output of `subgraph` among the library's results and then the inputs, or its expression.

    Raises:
        BundleInvalid: the library does not return it.
    """
    places = {name: index for index, name in enumerate((*library.results, *subgraph.inputs))}
    sizes_known = {node.name: node.meta.value for node in graph.nodes if isinstance(node.meta, SizeMeta)}
    found: list[int | _Other] = []
    for output in subgraph.outputs:
        if not isinstance(output, str):
            found.append(_Other(output))
        elif output in places:
            found.append(places[output])
        elif (size := sizes_known.get(output)) is not None:
            found.append(_Other(SizeArgument(value=size)))
        else:
            raise BundleInvalid(
                f"library {library.file!r} does not return {output[:80]!r}",
                where=where,
                check="target-malformed/library-result",
            )
    return found
