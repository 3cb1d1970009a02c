"""The `cpu` engine: functional graphs, whole or partitioned, as shared libraries.

A library computes the same values as the generated code of the `portable` engine, so that everything around it (saved
values, epilogues, hooks) is the same. Calls that it was not compiled for run the generated code.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.errors import NotSupported, Place, first_line
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph, marked
from aotexport_runtime.execution.matmul.onednn import prefers_onednn
from aotexport_runtime.execution.matmul.sizes import Mode
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.program import Partition, Program
from aotexport_runtime.schema.values import Argument, SizeArgument, SizeMeta
from aotexport_runtime.values import sizes

if TYPE_CHECKING:
    from aotexport_runtime.schema.targets import CompiledHalf, CpuRequirements

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


class Libraries(Native):
    """The libraries of one program, for a target."""

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
        self._compiled = compiled
        self._environment = environment
        self._graph = graph = bundle.graph(program.name, program.functional.file)
        metas = {node.name: node.meta for node in graph.nodes}
        self._sizes = {
            name: meta.value for name, meta in metas.items() if isinstance(meta, SizeMeta) and meta.value is not None
        }
        self._program = program
        self._symbols = [dimension.symbol for dimension in program.dimensions]
        self._place = Place(f"targets/{target}/target.json")
        libraries = [each for each in (compiled.forward, compiled.backward) if each is not None]
        paths = {library.file: bundle.intact_file(f"targets/{target}/{library.file}") for library in libraries}
        # From the end: the sizes come first.
        written = {
            library.file: [library.inputs.index(name) - len(library.inputs) for name in library.written]
            for library in libraries
        }
        self._libraries = {file: Library(path, environment.matmul, written[file]) for file, path in paths.items()}
        gradients = program.functional.gradients
        partitions: tuple[Partition, ...] = () if gradients is None else gradients.partitions
        self.partition = next((p for p in partitions if p.name == compiled.partition), None)

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        unmet = [guard for guard in self._compiled.guards if not sizes.evaluate(guard, symbols)]
        if not unmet:
            return None
        names = {dimension.symbol: dimension.name for dimension in self._program.dimensions}
        return f"libraries are for {' and '.join(sizes.describe(guard, names).strip('()') for guard in unmet)}"

    def why_not_backward(self, defined: Sequence[bool]) -> str | None:
        undefined = self._compiled.undefined_tangents
        if all(is_defined == (index not in undefined) for index, is_defined in enumerate(defined)):
            return None
        return f"the library is for a backward pass from {'the loss alone' if undefined else 'every output'}"

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        return self._function(self._compiled.forward, subgraph, fallback)

    def _with_inputs(self, library: CompiledHalf, outputs: Sequence[Argument]) -> list[Argument]:
        """Return the outputs of a subgraph with the inputs that the library writes in the place of their new values."""
        found = list(outputs)
        mutations = self._program.functional.mutations if self._program.functional is not None else ()
        for place, mutation in enumerate(mutations if library.written else ()):
            if (name := self._graph.inputs[mutation.input_index].name) in library.written:
                found[place] = name
        return found

    def backward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        assert self._compiled.backward is not None
        return self._function(self._compiled.backward, subgraph, fallback)

    def _function(self, library: CompiledHalf, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        taken = {name: index for index, name in enumerate(subgraph.inputs)}
        values, sizes_of = {*library.results, *taken}, self._sizes
        whole = self._with_inputs(library, subgraph.outputs)
        outputs = [
            SizeArgument(value=sizes_of[each]) if isinstance(each, str) and each in sizes_of.keys() - values else each
            for each in whole
        ]
        for name in library.inputs:
            message = f"library {library.file!r} takes {name[:80]!r}, which is no input"
            self._place.require(name in taken, message, "target-malformed/library-input")
        for name in outputs:
            if isinstance(name, str):
                message = f"library {library.file!r} does not return {name[:80]!r}"
                self._place.require(name in values, message, "target-malformed/library-result")
        inputs = [taken[name] for name in library.inputs]
        known = [*library.results, *subgraph.inputs]
        returned = compile_graph(self._graph, (), known, outputs, self._environment, detached=values)
        run, symbols_taken = marked(library.file, self._libraries[library.file].run), self._symbols
        portable = functools.cache(fallback)

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            tensors = [args[index] for index in inputs]
            if symbols_taken:
                # A tensor without elements tells the library the sizes.
                tensors.insert(0, torch.empty([*[symbols[symbol] for symbol in symbols_taken], 0]))
            try:
                results = run(tensors)
            except RuntimeError as error:
                if library.written:
                    raise
                log.warning("library %s failed, and the graph runs instead: %s", library.file, first_line(error))
                return portable()(args, symbols)
            if library.indexes and results.pop().item():
                # Operators of torch raise eager's error.
                return portable()(args, symbols)
            results += args
            args.clear()
            return returned(results, symbols)

        return call


# --- libraries, loaded into this process --------------------------------------------------------------------
#
# AOTInductor's runner is a private name of torch; the public one imports its compiler.

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A loaded library: called with its inputs, returns its results."""


def _load(path: Path) -> Runner:
    try:
        runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu
        return runner(loader_name(path), 1).run
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise NotSupported(f"the library `{path.name}` cannot be loaded: {reason}") from None


_names: dict[tuple[str, int, int], str] = {}
"""Names that files were loaded by; keys are path, device and inode."""


def loader_name(path: Path) -> str:
    """Return a name by which the system's loader opens the file that is at `path` now; none: `OSError`.

    The loader takes a known name for the file that it loaded before, even if another has replaced it: another export to
    the same directory, a link that leads elsewhere. Another spelling of the path makes the loader open the file.
    """
    status = path.stat()
    key = str(path), status.st_dev, status.st_ino
    if key not in _names:
        before = sum(other == key[0] for other, *_ in _names)
        _names[key] = f"{path.parent}/{'./' * before}{path.name}"
    return _names[key]


# --- backends of matmuls ------------------------------------------------------------------------------------
#
# The first call of a library notes its matmuls, and the backend of each is decided after it
# (`aotexport/lower/cpu/matmul.h`). A library without that table runs as torch runs it.

_CAPACITY = 128
_MODES: tuple[Mode | None, ...] = (None, "fastest", "onednn", "torch")
"""Modes by their numbers in the table."""


class _Matmul(ctypes.Structure):
    _fields_ = (("is_", ctypes.c_int64 * 8), ("by_onednn", ctypes.c_int64))


class _MatmulTable(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in ("mode", "count", "is_closed")), ("matmuls", _Matmul * _CAPACITY))


class Library:
    """A loaded library; the backends of its matmuls are decided before it returns its first results.

    Attributes:
        run: takes the library's inputs, returns its results.
    """

    run: Runner

    def __init__(self, path: Path, mode: Mode, written: Sequence[int] = ()) -> None:
        """Load the shared library at `path`, with a matmul backend; loading runs code of the library.

        `written`: places among its inputs of the tensors that it writes.

        Raises:
            NotSupported: it cannot be loaded here, or is loaded in another mode; its backends are decided only once.
        """
        self._run = run = _load(path)
        self._mode: Mode = mode
        self._written = written
        self._lock = threading.Lock()
        table = table_of(path)
        if table is None:
            self.run = run
            return
        other = _MODES[table.mode]
        if other not in (None, mode):
            raise NotSupported(
                f"this process has the library `{path.name}` loaded with matmul=`{other}`; for matmul=`{mode}`, "
                "load it in another process"
            )
        table.mode = _MODES.index(mode)
        table.is_closed = table.is_closed or mode == "torch"
        self._table = table  # pyrefly: ignore[possibly-uninitialized-attribute] (read by `_first_run` alone)
        self.run = run if table.is_closed else self._first_run

    def _first_run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decide the backend of each matmul, and close the table; run again if oneDNN computes any."""
        with self._lock:
            random_state = torch.get_rng_state()
            before = [(inputs[place], inputs[place].clone()) for place in self._written]
            results, table = self._run(inputs), self._table
            if not table.is_closed:
                matmuls = table.matmuls[: table.count]
                for matmul in matmuls:
                    matmul.by_onednn = self._prefers_onednn(list(matmul.is_))
                table.is_closed = True
                if any(matmul.by_onednn for matmul in matmuls):
                    torch.set_rng_state(random_state)
                    for tensor, value in before:
                        tensor.copy_(value)
                    results = self._run(inputs)
            self.run = self._run
            return results

    def _prefers_onednn(self, matmul: Sequence[int]) -> bool:
        has_bias, rows, depth, columns, *strides = matmul
        # In the layout that the library computes with; numbers do not matter.
        left = torch.ones(rows * depth).as_strided((rows, depth), strides[:2])
        right = torch.ones(depth * columns).as_strided((depth, columns), strides[2:])
        args = (torch.ones(columns), left, right) if has_bias else (left, right)
        op = "aten::addmm.default" if has_bias else "aten::mm.default"
        return prefers_onednn(op, args, self._mode)


def table_of(path: Path) -> _MatmulTable | None:
    """Return the table of matmuls of a loaded library, in its own memory; None: it has none."""
    try:
        table_function = ctypes.CDLL(loader_name(path)).aotexport_products
    except (OSError, AttributeError):
        return None
    table_function.restype = ctypes.POINTER(_MatmulTable)
    return table_function().contents
