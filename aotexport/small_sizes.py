"""The sentence for models that do something else for a dynamic size of 0 or 1, which a graph for all sizes does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aotexport.vectors.arguments import symbols_of
from aotexport_runtime.bundle import Bundle, open_bundle
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.program import SizeInput
from aotexport_runtime.schema.vectors import Vector


def small_sizes(directory: Path, programs: Sequence[str], results: Sequence[dict[str, Any]]) -> str | None:
    """Return the way out where of some programs only calls with a dynamic size of 0 or 1 disagree.

    Args:
        directory: the bundle.
        programs: names of programs that disagree.
        results: of the self-test: program, name of the recorded call, whether it agrees.
    """
    failing = {(r["program"], r["vector"]) for r in results if r["program"] in programs and not r["agrees"]}
    bundle = open_bundle(directory, check_digests=False)
    entries = [entry for entry in bundle.manifest.testvectors if (entry.program, entry.name) in failing]
    small = [(entry.name, _small(bundle, entry)) for entry in entries]
    if not small or not all(sizes for _, sizes in small):
        return None
    # Calls that were made to try one size say which it is.
    tried = [sizes for name, sizes in small if name.endswith(("-is-0", "-is-1"))]
    names = sorted(set().union(*(tried or (sizes for _, sizes in small))))
    declared = ", ".join(map(_declaration, names))
    larger = ", and give an example that is so large" if any(name == "example" for name, _ in small) else ""
    return f"the model does something else for sizes 0 and 1, which a graph does not hold: declare {declared}{larger}"


def _declaration(name: str) -> str:
    return f"Dim('{name}', min=2)" if name.isidentifier() else f"Dim.DYNAMIC(min=2) for `{name}`"


def _small(bundle: Bundle, entry: VectorEntry) -> set[str]:
    """Return the names of the dynamic sizes of tensors that are 0 or 1 in a recorded call."""
    program = bundle.program(entry.program)
    symbols = symbols_of(program, bundle.record(entry.record, Vector).inputs)
    return {
        dimension.name
        for dimension in program.dimensions
        if symbols[dimension.symbol] in (0, 1) and not isinstance(program.inputs[dimension.input_index], SizeInput)
    }
