"""Notes for the user on the facts that a trace fixed: values that its code read, sizes and integers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aotexport.capture.trace.example_values import Decision
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.shapes import fixed_hints
from aotexport.model.call import ExampleCall
from aotexport.model.source_lines import relative_path, source_of
from aotexport.torch_internals.checks import line_of
from aotexport.values.sizes import encode_size
from aotexport_runtime.errors import listed
from aotexport_runtime.schema.graph import SourceLine
from aotexport_runtime.schema.program import Note, Parameter
from aotexport_runtime.schema.sizes import Dimension, SizeExpression
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.values.sizes import describe, symbols_of
from aotexport_runtime.values.trees import leaves

OTHER_SIZES = "other sizes are refused (CallInvalid)"

_LINE = re.compile(r"(?P<file>\S+):(?P<line>\d+): in (?P<function>\S+): ")


def trace_notes(
    call: ExampleCall, forward: ForwardCapture, known: Iterable[Dimension], root: Path | None, *, strip: bool
) -> tuple[Note, ...]:
    """Return the facts that a trace with these dimensions fixed, as notes; `strip` leaves out source lines."""
    names = {dimension.symbol: dimension.name for dimension in known}
    lines = Lines(root, strip)
    found = [
        *(_of_decision(decision, lines) for decision in forward.function.values.decisions),
        *_of_guards(forward, names, lines),
        *(
            Note(kind="size", text=f"{fact}, and was declared dynamic", fixed=fact, outside=OTHER_SIZES, source=line)
            for fact, line in ((f"`{where}` is {size}", lines.at(at)) for where, size, at in fixed_hints(forward, call))
        ),
        *_of_integers(call.parameters),
    ]
    return tuple(dict.fromkeys(found))


class Lines:
    """The user's source lines, or none with `strip`."""

    def __init__(self, root: Path | None, strip: bool) -> None:
        """Take the directory that files are relative to; with `strip`, every line is None."""
        self._root, self._strip = root, strip

    def at(self, line: str | None) -> SourceLine | None:
        """Return the line in a text of `user_line`."""
        match = None if self._strip else _LINE.fullmatch(line or "")
        if match is None:
            return None
        file = relative_path(match["file"], self._root)
        return SourceLine(file=file, line=int(match["line"]), function=match["function"])

    def apart(self, text: str) -> tuple[str, SourceLine | None]:
        """Return a sentence without the line that `user_line` put into it, and that line."""
        match = _LINE.search(text)
        return (text, None) if match is None else (text.replace(match[0], "", 1), self.at(match[0]))

    def of(self, stack: str) -> SourceLine | None:
        """Return the innermost line of a stack."""
        return None if self._strip else source_of(stack, self._root)


def size_lines(forward: ForwardCapture, root: Path | None, *, strip: bool) -> dict[str, SourceLine]:
    """Return, by the symbol's name, the line that narrowed its range."""
    lines, found = Lines(root, strip), dict[str, SourceLine]()
    for guard in forward.fakes.mode.shape_env.guards:  # type: ignore[union-attr]
        line, symbols = lines.at(line_of(guard)), list(map(str, guard.expr.free_symbols))
        if line is not None and len(symbols) == 1:
            found.setdefault(symbols[0], line)
    return found


def _of_decision(decision: Decision, lines: Lines) -> Note:
    if decision.is_number:
        text = "code of the model makes a Python number of a tensor, and the program is for the example's alone"
        outside = "a call with another raises CheckFailed; keep it a tensor, or do outside of the model what needs it"
    else:
        text = "code of the model branches on values of tensors, and the program goes the example's way"
        outside = "a call that leads another way raises CheckFailed; choose with torch.where or torch.cond"
    return Note(
        kind="number" if decision.is_number else "branch",
        text=f"{text}: {decision.fixed}",
        fixed=decision.fixed,
        outside=outside,
        source=lines.of(decision.stack),
    )


def _of_guards(forward: ForwardCapture, names: dict[str, str], lines: Lines) -> Iterator[Note]:
    """Yield a note per line that relates sizes to each other or to numbers, beyond ranges."""
    by_line: dict[SourceLine | None, dict[str, None]] = {}
    for guard in forward.fakes.mode.shape_env.guards:  # type: ignore[union-attr]
        size: Any = encode_size(guard.expr, or_none=True)
        is_known = isinstance(size, SizeExpression) and symbols_of(size) <= names.keys()
        if is_known and (size.op not in ("lt", "le") or not any(isinstance(arg, int) for arg in size.args)):
            by_line.setdefault(lines.at(line_of(guard)), {})[f"`{describe(size, names)}`"] = None
    for line, relations in by_line.items():
        shown = listed([*relations])
        text = f"the model holds sizes to {shown}"
        yield Note(kind="size", text=text, fixed=shown, outside=OTHER_SIZES, source=line)


def _of_integers(parameters: Iterable[Parameter]) -> Iterator[Note]:
    for parameter in parameters:
        for path, leaf in leaves(parameter.tree, parameter.name):
            if isinstance(leaf, Constant) and type(leaf.value) is int and not parameter.optional:
                fixed = f"`{path}` is {leaf.value}"
                outside = "another integer is refused (CallInvalid), unless it is declared dynamic"
                yield Note(kind="integer", text=f"{fixed}, as in the example", fixed=fixed, outside=outside)
