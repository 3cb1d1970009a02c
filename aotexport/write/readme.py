"""Write the README of a bundle: its purpose, its inputs and outputs, and the lines that load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aotexport.encode.program import EncodedProgram
from aotexport_runtime.commands.describe import describe_inputs, describe_outputs
from aotexport_runtime.schema.program import Program


def write_readme(directory: Path, name: str, programs: Sequence[EncodedProgram]) -> None:
    """Write `README.md` below `directory`."""
    lines = [f"# {name}", "", "A bundle: a PyTorch model as data, runnable without the model's code.", ""]
    lines += ["```python", "import aotexport_runtime", "", 'module = aotexport_runtime.load("path/to/this/directory")']
    lines += [f"outputs = module({_arguments(programs[0].record)})", "```", ""]
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


def _arguments(program: Program) -> str:
    required = [parameter for parameter in program.parameters if not parameter.optional]
    positional = [p.name for p in required if p.kind in ("positional_only", "positional_or_keyword")]
    return ", ".join(positional + [f"{p.name}={p.name}" for p in required if p.kind == "keyword_only"])
