"""The frames of the model's code that a trace records with its nodes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_stack
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from aotexport.process.patches import Patch, patched


def frames_kept(keeps: Callable[[FrameType], bool]) -> contextlib.AbstractContextManager[None]:
    """Record the frames below the call of the model for which `keeps` is true; torch records functions `forward`.

    Torch looks up the source of every frame of every node first, which takes as long as the rest of a trace.
    """
    original = PythonKeyTracer.create_node

    @functools.cache
    def text_of(frames: tuple[tuple[str, int, str], ...]) -> str:
        return "".join(StackSummary.from_list([FrameSummary(*frame) for frame in frames]).format()).strip()

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> torch.fx.Node:
        records, self.record_stack_traces = self.record_stack_traces, False
        try:
            node = original(self, *args, **kwargs)
        finally:
            self.record_stack_traces = records
        if records and node.op not in ("placeholder", "output") and not node.stack_trace:
            frames = _frames_below_call(sys._getframe(1), keeps)
            if frames:
                node.stack_trace = text_of(frames)
        return node

    return patched(Patch(PythonKeyTracer, "create_node", create_node, "Look up the source of the user's frames alone"))


# Frames of this package below that file run in place of functions that the model calls.
_CALLER = str(Path(__file__).parents[1] / "capture" / "forward.py")


def _frames_below_call(frame: FrameType, keeps: Callable[[FrameType], bool]) -> tuple[tuple[str, int, str], ...]:
    """Return file, line and function of the frames that `keeps` accepts, from the call of the model to `frame`."""
    below = itertools.takewhile(lambda each: each[0].f_code.co_filename != _CALLER, walk_stack(frame))
    found = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in below if keeps(each)]
    return tuple(reversed(found))
