"""Losses: from a batch and a model to a number to minimise, and what people read beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from aotexport.errors import DataInvalid
from aotexport.finetune.model import OWN_LOSS, Batch, Call, Model, check_has, chosen
from aotexport.finetune.settings import Loss, Settings

TARGET = "target"
"""The classes of a batch, beside the inputs."""
FIRST, SECOND = "first ", "second "
"""Prefixes of the inputs of the two sides of pairs."""
IGNORED = -100
"""The class of a token that has none."""
_SCALE = 20.0


@dataclass(frozen=True)
class Outcome:
    """What a batch gives: the mean loss, and the number of right answers of all; None: there are none."""

    loss: torch.Tensor
    right: int | None = None
    answers: int = 0


def outcome(model: Model, batch: Batch, settings: Settings) -> Outcome:
    """Return the loss of a batch; `DataInvalid`: an output or a class does not fit the loss."""
    return _LOSSES[settings.loss](model.call, batch, settings)


def _classification(call: Call, batch: Batch, settings: Settings) -> Outcome:
    outputs, target = call(batch), batch[TARGET]
    logits = chosen(outputs, settings.result, "logits", 2, "logits [examples, classes]")
    if int(target.max()) >= logits.shape[1]:
        raise DataInvalid(f"the data has class {int(target.max())}, and the bundle has {logits.shape[1]} classes")
    loss = check_has(outputs, OWN_LOSS) if "labels" in batch else functional.cross_entropy(logits, target)
    return Outcome(loss, int((logits.argmax(1) == target).sum()), len(target))


def _causal_lm(call: Call, batch: Batch, settings: Settings) -> Outcome:
    outputs = call(batch)
    if "labels" in batch:
        return Outcome(check_has(outputs, OWN_LOSS))
    logits = chosen(outputs, settings.result, "logits", 3, "logits [examples, tokens, words]")
    return Outcome(functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[TARGET][:, 1:].flatten()))


def _pairs(call: Call, batch: Batch, settings: Settings) -> Outcome:
    """Contrast each pair with the other second sides of the batch, by the cosine."""
    sides: list[torch.Tensor] = []
    for prefix in (FIRST, SECOND):
        own = {name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)}
        side = chosen(call(own), settings.result, "pooler_output", 2, "embeddings [examples, size]")
        sides.append(functional.normalize(side, dim=1))
    scores = sides[0] @ sides[1].T * _SCALE
    target = torch.arange(len(scores), device=scores.device)
    return Outcome(functional.cross_entropy(scores, target), int((scores.argmax(1) == target).sum()), len(target))


_LOSSES: dict[Loss, Callable[[Call, Batch, Settings], Outcome]] = {
    "classification": _classification,
    "causal-lm": _causal_lm,
    "pairs": _pairs,
}
