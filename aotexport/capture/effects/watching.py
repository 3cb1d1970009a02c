"""Watch the model while it runs under tracing, by patches that catch the effects tracing loses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from aotexport.capture.effects.attributes import attributes_kept
from aotexport.capture.effects.autograd_functions import refuse_bound
from aotexport.capture.effects.checkpoints import Checkpoints
from aotexport.capture.effects.patched import patches
from aotexport.capture.effects.questions import Questions, current_questions
from aotexport.capture.effects.record import Effects, Read
from aotexport.process.patches import patched
from aotexport.torch_internals.applications import applied_functions


@contextlib.contextmanager
def observed(module: nn.Module | None, *, above_autograd: bool = True, grad: bool = True) -> Iterator[Effects]:
    """Watch the model run under tracing.

    Args:
        module: the model; None: a function.
        above_autograd: see `Effects`.
        grad: see `Effects`.

    Yields:
        The effects, complete once the block has ended.

    Raises:
        ExportFailed: the model did something that tracing loses.
    """
    reads = set[Read]()
    questions = Questions(grad, reads)
    effects = Effects(
        above_autograd=above_autograd,
        grad=grad,
        reads=reads,
        questions=questions,
        checkpoints=Checkpoints(module),
    )
    tables = [vars(each) for each in module.modules()] if module is not None else []
    with (
        attributes_kept(module, effects),
        applied_functions(effects.applied, refuse_bound, tables),
        patched(*patches(effects), *effects.checkpoints.patches()),
    ):
        token = current_questions.set(questions)
        try:
            yield effects
        finally:
            current_questions.reset(token)
