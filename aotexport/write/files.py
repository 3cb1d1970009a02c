"""Write the files of a bundle, and list them with their digests."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aotexport.encode.program import EncodedProgram
from aotexport.torch_internals.names import custom_operator_module
from aotexport.values.subclasses import types_of
from aotexport_runtime.allowed.operators import NAMESPACES
from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.commands.saving import entry_of
from aotexport_runtime.module.describe import describe_inputs, describe_outputs
from aotexport_runtime.schema.bounded import Record, defaults_of
from aotexport_runtime.schema.codec import as_written, decode_record, encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import FileEntry, Manifest, Requirements, StateTensor, VectorEntry
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.schema.versions import FEATURES, Version, format_version
from aotexport_runtime.validate.arguments import graphs_of


def write_programs(programs: Sequence[EncodedProgram], directory: Path) -> None:
    """Write each program's record and graphs below `directory`, replacing earlier ones."""
    shutil.rmtree(directory / "programs", ignore_errors=True)
    for program in programs:
        folder = directory / "programs" / program.record.name
        folder.mkdir(parents=True)
        (folder / "program.json").write_bytes(encode_record(program.record))
        for name, graph in program.graphs.items():
            (folder / name).write_bytes(encode_record(graph, indent=False))
        for dtype, cast in program.casts.items():
            (folder / f"program.{dtype}.json").write_bytes(encode_record(cast.record))
            for name, graph in cast.graphs.items():
                (folder / name).write_bytes(encode_record(graph, indent=False))


def write_manifest(
    manifest: Manifest, programs: Sequence[EncodedProgram], directory: Path, known: Iterable[FileEntry] = ()
) -> Manifest:
    """Write a manifest with the files below `directory`, and with what a load of them needs; return it.

    `known` are entries of files that have not changed since, whose digests need not be computed again.
    """
    everything = [*programs, *(cast for program in programs for cast in program.casts.values())]
    manifest = msgspec.structs.replace(
        manifest, requirements=_requirements(everything, manifest.state), files=list_files(directory, known)
    )
    needed = min_reader([manifest, *map(as_written, _documents(everything, manifest.testvectors, directory))])
    manifest = msgspec.structs.replace(manifest, min_reader=format_version(needed))
    (directory / MANIFEST_NAME).write_bytes(encode_record(manifest))
    return manifest


def _documents(
    programs: Sequence[EncodedProgram], vectors: tuple[VectorEntry, ...], directory: Path
) -> Iterator[Record]:
    for program in programs:
        yield from (program.record, *program.graphs.values())
        if program.lowered is not None:
            yield from (program.lowered.record, *program.lowered.graphs.values())
    for entry in vectors:
        yield decode_record((directory / entry.record).read_bytes(), Vector, where=entry.record)


def list_again(directory: Path, manifest: Manifest) -> Manifest:
    """Rewrite the manifest of a bundle; its `files` have not changed, but for recorded calls. Return it."""
    known = [entry for entry in manifest.files if not entry.path.startswith("testvectors/")]
    manifest = msgspec.structs.replace(manifest, files=list_files(directory, known))
    # A new file, not new content: the old one may be a hard link to another bundle's.
    (directory / MANIFEST_NAME).unlink()
    (directory / MANIFEST_NAME).write_bytes(encode_record(manifest))
    return manifest


def list_files(directory: Path, known: Iterable[FileEntry] = ()) -> tuple[FileEntry, ...]:
    """Return an entry for every file below `directory` but the manifest, sorted by path; `known` ones are unchanged."""
    entries = {entry.path: entry for entry in known}
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    paths = sorted(path.relative_to(directory).as_posix() for path in files)
    return tuple(entries.get(path) or entry_of(path, directory) for path in paths)


def _graphs(programs: Iterable[EncodedProgram]) -> Iterator[Graph]:
    return (each for program in programs for graph in program.graphs.values() for each in graphs_of(graph))


def _tensor_types(programs: Sequence[EncodedProgram], state: tuple[StateTensor, ...]) -> set[str]:
    records = [entry.subclass for entry in state]
    for program in programs:
        records += [spec.subclass for spec in program.record.inputs if isinstance(spec, ArgumentInput)]
        records += [record for graph in _graphs([program]) for record in graph.subclasses]
    return set[str]().union(*map(types_of, records))


def custom_operators(programs: Iterable[EncodedProgram]) -> set[str]:
    """Return the operators in the graphs of `programs` that are not torch's own."""
    operators = {node.op for graph in _graphs(programs) for node in graph.nodes}
    return {op for op in operators if op.partition("::")[0] not in {"aten", *NAMESPACES}}


def _requirements(programs: Sequence[EncodedProgram], state: tuple[StateTensor, ...]) -> Requirements:
    custom = custom_operators(programs)
    modules = {module for op in custom if (module := custom_operator_module(op)) is not None}
    return Requirements(
        operator_namespaces=tuple(sorted({op.partition("::")[0] for op in custom})),
        operator_modules=tuple(sorted(modules)),
        tensor_types=tuple(sorted(_tensor_types(programs, state))),
    )


def write_readme(directory: Path, name: str, programs: Sequence[EncodedProgram]) -> None:
    """Write `README.md` below `directory`: purpose, inputs and outputs of a bundle, and the lines that load it."""
    lines = [f"# {name}", "", "A bundle: a PyTorch model as data, runnable without the model's code.", ""]
    lines += ["```python", "import aotexport_runtime", "", 'module = aotexport_runtime.load("path/to/this/directory")']
    lines += [f"outputs = module({_arguments_of(programs[0].record)})", "```", ""]
    for encoded in programs:
        program, forward = encoded.record, encoded.graphs[encoded.record.forward.file]
        lines += [f"## Program `{program.name}`", "", "Inputs:", ""]
        lines += [f"- {line}" for line in describe_inputs(program)] or ["- none"]
        lines += ["", "Outputs:", ""]
        lines += [f"- {line}" for line in describe_outputs(program, forward)] or ["- none"]
        lines.append("")
    lines += [
        "`python -m aotexport_runtime inspect .` shows more; `python -m aotexport_runtime selftest .` compares it with",
        "recorded results of the original.",
        "",
    ]
    (directory / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _arguments_of(program: Program) -> str:
    required = [parameter for parameter in program.parameters if not parameter.optional]
    positional = [p.name for p in required if p.kind in ("positional_only", "positional_or_keyword")]
    return ", ".join(positional + [f"{p.name}={p.name}" for p in required if p.kind == "keyword_only"])


def min_reader(records: Iterable[Any]) -> Version:
    """Return the oldest format version whose readers understand a bundle of these documents.

    Args:
        records: every document of the bundle, as files have it (`as_written`); a field at its default is not used.
    """
    needed, waiting = (1, 0), [*records]
    while waiting:
        value = waiting.pop()
        if isinstance(value, msgspec.Struct):
            for field, default in defaults_of(type(value)).items():
                item = getattr(value, field)
                if item != default:
                    needed = max(needed, FEATURES.get(f"{type(value).__name__}.{field}", needed))
                    waiting.append(item)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return needed
