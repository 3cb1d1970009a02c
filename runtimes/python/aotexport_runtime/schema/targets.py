"""A program lowered for a target: faster forms of its functional graph.

The files of a target are below `targets/<target>/`. Each program that the target has is described by
`programs/<program>/lowered.json` there (`LoweredProgram`); further files depend on the target.
"""

from __future__ import annotations

from typing import Annotated

from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.bounded import Count, PlainName
from aotexport_runtime.schema.references import AtMost
from aotexport_runtime.schema.sizes import Condition

MAX_SAVED = 1_000_000


class LoweredProgram(Record, kw_only=True):
    """Forward and backward of a program as a target runs them, in place of its functional graph.

    The calling convention (mutations, outputs, gradients, tangents) is that of `Program.functional`. A call that a
    lowered form does not take runs the functional graph.

    Attributes:
        forward: graph of the forward, relative to the directory of this record. Its inputs are the program's; its
            outputs the functional graph's results before gradients, then the saved tensors.
        backward: graph of the backward. Its inputs are the saved tensors, then one per tangent; its outputs one per
            input of the program: its gradient, or null where the functional graph has none. None: an inference program.
        saved: how many tensors the forward saves for the backward.
        guards: truths over the symbols that only the lowered form assumes.
    """

    forward: PlainName
    backward: PlainName | None = None
    saved: Annotated[Count, AtMost(MAX_SAVED)] = 0
    guards: tuple[Condition, ...] = ()
