"""Sequences that are generated, and batches of them with their keys and values, which sequences join and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
        put: takes each token, or the error that ends the sequence, in the thread of the generator.
        source: draws tokens.
        logprobs: how many of the likeliest tokens are told of at each place; None: no logarithms at all.
        adapter: name of the adapter that is applied; None: none.
        wanted: turned off by the caller who wants no more.
        since: when it came, by `time.monotonic`; `began`: when its prompt was read; 0: it was not.
        company: the most sequences that it was in one step with, itself among them.
    """

    prompt: Sequence[int]
    most: int
    put: Callable[[Token | Exception], None]
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

    `read` has the lengths of sequences in a causal model, which are padded on the left; None: all are as long.
    """

    rows: list[Generation]
    mask: torch.Tensor
    cache: list[tuple[torch.Tensor, ...]]
    read: list[int] | None

    def keep(self, places: list[int]) -> None:
        """Let go of the other sequences, and of padding that is left over."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if not places:
            return
        chosen, cut = torch.tensor(places, device=self.mask.device), 0
        if self.read is not None:
            self.read = [self.read[place] for place in places]
            cut = self.mask.shape[1] - max(self.read)
        self.mask = self.mask[:, cut:].index_select(0, chosen)
        self.cache = [tuple(part[:, :, cut:].index_select(0, chosen) for part in layer) for layer in self.cache]

    def join(self, other: SequenceBatch) -> None:
        """Take the sequences of another batch, of a causal model as well."""
        assert self.read is not None
        assert other.read is not None
        length = max(self.mask.shape[1], other.mask.shape[1])

        def joined(one: torch.Tensor, two: torch.Tensor, after: int) -> torch.Tensor:
            missing = [(each, length - each.shape[-1 - after]) for each in (one, two)]
            return torch.cat(
                [torch.nn.functional.pad(each, (0, 0) * after + (more, 0)) if more else each for each, more in missing]
            )

        self.mask = joined(self.mask, other.mask, 0)
        self.cache = [
            tuple(joined(one, two, 1) for one, two in zip(*layers, strict=True))
            for layers in zip(self.cache, other.cache, strict=True)
        ]
        self.rows, self.read = self.rows + other.rows, self.read + other.read
