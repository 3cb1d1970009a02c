"""Losses: from a batch and a model to a number to minimise, and what people read beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from aotexport_runtime.errors import DataInvalid
from aotexport_runtime.finetune.model import OWN_LOSS, OWN_TARGET, Batch, Model, chosen
from aotexport_runtime.finetune.settings import Loss, Settings
from aotexport_runtime.finetune.table import listed
from aotexport_runtime.finetune.targets import IGNORED

TARGET = "target"
"""What a batch shall give, beside the inputs."""
FIRST, SECOND = "first ", "second "
"""Prefixes of the inputs of the two sides of pairs."""
_SCALE = 20.0


@dataclass(frozen=True)
class Outcome:
    """What a batch gives.

    Attributes:
        loss: mean over the targets, a scalar.
        right: number of right answers.
        answers: number of answers; 0: none is right or wrong.
    """

    loss: torch.Tensor
    right: int = 0
    answers: int = 0


@dataclass(frozen=True)
class _Kind:
    """A loss that compares an output with the targets.

    Attributes:
        what: the output, with its axes, for messages.
        mean: returns the loss of output and targets.
        right: returns which answers are right; None: none is right or wrong.
        axes: numbers of axes that the output may have.
    """

    what: str
    mean: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    right: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    axes: tuple[int, ...]


def outcome(model: Model, batch: Batch, settings: Settings) -> Outcome:
    """Return the loss of a batch, by the model itself where it computes one.

    `DataInvalid`: an output or a class does not fit the loss.
    """
    if settings.loss == "pairs":
        return _pairs(model, batch, settings)
    kind, outputs, target = _KINDS[settings.loss], model.call(batch), batch[TARGET]
    follows = settings.loss in ("causal-lm", "completion")
    if follows:
        target = target[:, 1:]
    own = outputs.get(OWN_LOSS) if OWN_TARGET in batch else None
    if own is None and OWN_TARGET in batch:
        raise DataInvalid(f"the bundle takes `{OWN_TARGET}` and has no output `{OWN_LOSS}`; it has {listed(outputs)}")
    if own is not None and kind.right is None:
        return Outcome(own)
    output = chosen(outputs, settings.result, "logits", kind.axes, kind.what)
    output = output[:, :-1] if follows else output
    loss = kind.mean(output, target) if own is None else own
    if kind.right is None:
        return Outcome(loss)
    right = kind.right(output, target)[target != IGNORED]
    return Outcome(loss, int(right.sum()), right.numel())


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if int(target.max()) >= logits.shape[-1]:
        raise DataInvalid(f"the data has class {int(target.max())}, and the bundle has {logits.shape[-1]} classes")
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def _of_numbers(
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.numel() != target.numel():
            has, needs = target.shape[1:].numel(), output.shape[1:].numel()
            raise DataInvalid(f"the data has {has} numbers an example, and the bundle's output {needs}")
        return compare(output, target.view_as(output))

    return mean


def _pairs(model: Model, batch: Batch, settings: Settings) -> Outcome:
    """Contrast each pair with the other second sides of the batch, by the cosine."""
    sides: list[torch.Tensor] = []
    for prefix in (FIRST, SECOND):
        own = {name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)}
        side = chosen(model.call(own), settings.result, "pooler_output", (2,), "embeddings [examples, size]")
        sides.append(functional.normalize(side, dim=1))
    scores = sides[0] @ sides[1].T * _SCALE
    target = torch.arange(len(scores), device=scores.device)
    right = int((scores.argmax(1) == target).sum())
    return Outcome(functional.cross_entropy(scores, target), right, len(target))


def _largest(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1) == target


_WORDS = _Kind("logits [examples, tokens, words]", _cross_entropy, None, (3,))
_KINDS: dict[Loss, _Kind] = {
    "classification": _Kind("logits [examples, classes]", _cross_entropy, _largest, (2,)),
    "multi-label": _Kind(
        "logits [examples, classes]",
        _of_numbers(functional.binary_cross_entropy_with_logits),
        lambda logits, target: (logits > 0) == (target > 0.5),
        (2,),
    ),
    "regression": _Kind("numbers [examples, numbers]", _of_numbers(functional.mse_loss), None, (1, 2)),
    "token-classification": _Kind("logits [examples, tokens, classes]", _cross_entropy, _largest, (3,)),
    "causal-lm": _WORDS,
    "completion": _WORDS,
    "seq2seq": _WORDS,
}
