"""What a program is held to, in words."""

from __future__ import annotations

from typing import Literal

from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.graph import SourceLine


class Note(Record, kw_only=True):
    """What a program is held to, or what it does not do; for people.

    Attributes:
        kind: `branch`: code of the model branches on values of tensors, and the program goes the example's way;
            `number`: code of the model makes a number of a tensor's values, and the program is for the example's alone;
            `size`: dynamic sizes have a narrower range than was declared, or are held to a relation; `integer`: an
            integer of the call is the example's; `other`: what the bundle does otherwise than the model, or needs.
        text: a sentence.
        fixed: what was fixed; None: nothing was.
        outside: what a call gets for which that does not hold, and the way out; None: no call is refused for it.
        source: the user's line; None: there is no single one, or it was left out.
    """

    kind: Literal["branch", "number", "size", "integer", "other"]
    text: str
    fixed: str | None = None
    outside: str | None = None
    source: SourceLine | None = None
