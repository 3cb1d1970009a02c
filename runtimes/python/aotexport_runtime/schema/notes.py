"""Limits of a program, in words."""

from __future__ import annotations

from typing import Literal

from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.graph import SourceLine


class Note(Record, kw_only=True):
    """A limit of a program, or a feature that it lacks; for people.

    Attributes:
        kind: `branch`: code of the model branches on values of tensors, and the program goes the example's way;
            `number`: code of the model makes a number of a tensor's values, and the program is for the example's alone;
            `size`: dynamic sizes have a narrower range than was declared, or are held to a relation; `integer`: an
            integer of the call is the example's; `other`: a difference from the model, or a need of the bundle.
        text: a sentence.
        fixed: the fixed value or choice; None: there is none.
        outside: the effect on a call outside of it, and the way out; None: no call is refused for it.
        source: the user's line; None: there is no single one, or it was left out.
    """

    kind: Literal["branch", "number", "size", "integer", "other"]
    text: str
    fixed: str | None = None
    outside: str | None = None
    source: SourceLine | None = None
