"""What an error means, its cause and the way out, by its code or its class."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from aotexport_runtime import schema
from aotexport_runtime.errors import AotExportError, ArgumentInvalid


def explain(name: str) -> str:
    """Return a text about a code, such as `file-differs`, or a class of errors, such as `CallInvalid`.

    Raises:
        ArgumentInvalid: there is no such code or class; the message lists them.
    """
    codes = json.loads(Path(str(schema.__file__)).with_name("codes.json").read_text(encoding="utf-8"))
    classes = {each.__name__: each for each in _errors(AotExportError)}
    if name in codes:
        found = codes[name]
        return f"{name}: {found['means']}\n\nCause: {found['cause']}\n\nWay out: {found['way_out']}"
    if name in classes:
        return f"{name}: {inspect.getdoc(classes[name])}"
    raise ArgumentInvalid(f"no code or class of errors `{name}`; there are {', '.join([*codes, *sorted(classes)])}")


def _errors(kind: type[AotExportError]) -> Iterator[type[AotExportError]]:
    for each in kind.__subclasses__():
        # Others are for callers within.
        yield from (*([each] if each.__module__.endswith(".errors") else ()), *_errors(each))
