"""What a client is told when its request is not answered: one sentence and a code of the protocol."""

from __future__ import annotations

import logging
from typing import Literal

from aotexport_runtime.errors import (
    AotExportError,
    ArgumentInvalid,
    CallInvalid,
    CheckFailed,
    DeadlinePassed,
    Overloaded,
)

log = logging.getLogger("aotexport_runtime.server")

Kind = Literal[
    "invalid",
    "unauthorized",
    "forbidden",
    "not_found",
    "too_slow",
    "too_large",
    "overloaded",
    "cancelled",
    "unavailable",
    "deadline",
    "internal",
]

CODES: dict[Kind, tuple[int, str]] = {
    "invalid": (400, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "not_found": (404, "NOT_FOUND"),
    "too_slow": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "overloaded": (429, "RESOURCE_EXHAUSTED"),
    "cancelled": (499, "CANCELLED"),
    "internal": (500, "INTERNAL"),
    "unavailable": (503, "UNAVAILABLE"),
    "deadline": (504, "DEADLINE_EXCEEDED"),
}
"""Status of HTTP and of gRPC by kind."""


class Refusal(AotExportError):
    """A request that is not answered, and why (`kind`), as metrics and logs have it."""

    def __init__(self, text: str, kind: Kind = "invalid") -> None:
        self.kind: Kind = kind
        # One line, which a header of gRPC holds: names that a client sends may be longer.
        super().__init__(text.replace("\n", "\\n")[:1000])


_KINDS: dict[type[Exception], Kind] = {
    ArgumentInvalid: "invalid",
    CallInvalid: "invalid",
    CheckFailed: "invalid",
    Overloaded: "overloaded",
    DeadlinePassed: "deadline",
}


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told of an error of its call; the log has the traceback of one that is not the call's."""
    if isinstance(error, Refusal):
        return error
    text = " ".join(str(error).split())
    kind: Kind | None = next((_KINDS[known] for known in _KINDS if isinstance(error, known)), None)
    if kind is not None:
        return Refusal(text, kind)
    # Operators refuse values by these: an index out of range, a shape that does not broadcast.
    kind = "invalid" if isinstance(error, IndexError | ValueError) else "internal"
    if kind == "internal":
        log.error("a request failed", exc_info=error)
    return Refusal(f"the model failed with {type(error).__name__}: {text[:500]}", kind)
