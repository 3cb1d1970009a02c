"""Sequences that are generated, and batches of them with their keys and values, which sequences join and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from aotexport_runtime.generation.generate import Choice


@dataclass(frozen=True)
class Token:
    """A token of a sequence.

    Attributes:
        logprob: natural logarithm of its probability by the model's own scores; 0 unless it was asked for.
        best: the likeliest tokens and theirs, as many as were asked for; None: logarithms were not asked for.
        ended: `stop`: it ends the sequence, and is no text; `length`: no more may come.
    """

    id: int
    logprob: float = 0.0
    best: tuple[tuple[int, float], ...] | None = None
    ended: Literal["", "stop", "length"] = ""


@dataclass(eq=False, kw_only=True)
class Generation:
    """A sequence that is asked for.

    Attributes:
        prompt: tokens; of an encoder-decoder model, what the encoder reads.
        most: the most tokens that may come.
        choice: how they are chosen.
        put: takes each token, or the error that ends the sequence, in the thread of the generator; of trials, none.
        source: draws tokens.
        logprobs: how many of the likeliest tokens are told of at each place; None: no logarithms at all.
        adapter: name of the adapter that is applied; None: none.
        wanted: turned off by the caller who wants no more.
        since: when it came, by `time.monotonic`; `began`: when its prompt was read; 0: it was not.
        company: the most sequences that it was in one step with, itself among them.
    """

    prompt: Sequence[int]
    most: int
    put: Callable[[Token | Exception], None] = lambda _: None
    choice: Choice = field(default_factory=Choice)
    source: torch.Generator | None = None
    logprobs: int | None = None
    adapter: str | None = None
    wanted: bool = True
    since: float = field(default_factory=time.monotonic)
    began: float = 0.0
    company: int = 0
    tokens: list[int] = field(default_factory=list[int])


@dataclass(eq=False)
class SequenceBatch:
    """Sequences that are decoded together: keys and values, (batch, heads, length, width), the same length for all.

    Attributes:
        mask: 0 for padding, which is on the left of what was read and written; of an encoder-decoder model, of what was
            written.
        cache: per layer keys and values of that; of an encoder-decoder model, behind them those of what was encoded.
        read: the length of each without padding.
        encoded: of an encoder-decoder model: 0 for padding, which is on the right of what was encoded.
    """

    rows: list[Generation]
    mask: torch.Tensor
    cache: list[tuple[torch.Tensor, ...]]
    read: list[int]
    encoded: torch.Tensor | None = None

    def keep(self, places: list[int]) -> None:
        """Let go of the other sequences, and of padding that is left over."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if not places:
            return
        self.read = [self.read[place] for place in places]
        chosen, cut = torch.tensor(places, device=self.mask.device), self.mask.shape[1] - max(self.read)
        self.mask = self.mask[:, cut:].index_select(0, chosen)
        if self.encoded is not None:
            self.encoded = self.encoded.index_select(0, chosen)
        self.cache = [
            tuple(
                (part if index in _ENCODED else part[:, :, cut:]).index_select(0, chosen)
                for index, part in enumerate(layer)
            )
            for layer in self.cache
        ]

    def join(self, other: SequenceBatch) -> None:
        """Take the sequences of another batch."""
        self.mask = _joined(self.mask, other.mask, 1)
        if self.encoded is not None and other.encoded is not None:
            self.encoded = _joined(self.encoded, other.encoded, 1, on_the_left=False)
        self.cache = [
            tuple(
                _joined(one, two, 2, on_the_left=index not in _ENCODED)
                for index, (one, two) in enumerate(zip(*layers, strict=True))
            )
            for layers in zip(self.cache, other.cache, strict=True)
        ]
        self.rows, self.read = self.rows + other.rows, self.read + other.read


_ENCODED = (2, 3)
"""Places of keys and values of what was encoded, in a layer."""


def _joined(one: torch.Tensor, two: torch.Tensor, axis: int, *, on_the_left: bool = True) -> torch.Tensor:
    """Return the rows of both, padded along an axis to the longer."""
    length, inner = max(one.shape[axis], two.shape[axis]), (0, 0) * (one.dim() - 1 - axis)
    missing = [(each, length - each.shape[axis]) for each in (one, two)]
    padded = [
        torch.nn.functional.pad(each, (*inner, *((more, 0) if on_the_left else (0, more)))) if more else each
        for each, more in missing
    ]
    return torch.cat(padded)


def padded(prompts: Sequence[Sequence[int]], device: Any, *, on_the_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, (batch, length), and a mask that is 0 for padding."""
    length = max(map(len, prompts))
    ids, mask = torch.zeros((2, len(prompts), length), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        place = slice(length - len(prompt), None) if on_the_left else slice(len(prompt))
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return ids, mask


def agree(alone: torch.Tensor, beside: torch.Tensor, least: float) -> bool:
    """Return whether scores are the same but for rounding; `least`: the error that they may have anyway."""
    limit = max(torch.finfo(alone.dtype).eps ** 0.5, least) * float(alone.abs().max())
    return float((alone - beside).abs().max()) <= limit


def likely_tokens(rows: Sequence[Generation], scores: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the probabilities of tokens per row, computed at once for rows that draw alike; of others, None."""
    alike: dict[tuple[float, int | None, float], list[int]] = {}
    for row, choice in enumerate(each.choice for each in rows):
        if choice.do_sample and choice.repetition_penalty == 1.0 and not choice.processors:
            alike.setdefault((choice.temperature, choice.top_k, choice.top_p), []).append(row)
    found: list[torch.Tensor | None] = [None] * len(rows)
    for places in alike.values():
        for row, likely in zip(places, rows[places[0]].choice.probabilities(scores[places]), strict=True):
            found[row] = likely
    return found
