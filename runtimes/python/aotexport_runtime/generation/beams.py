"""Beam search over the scores of a model, as `generate` of transformers 5 makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORST = -1.0e9
"""Score of what must not be chosen; transformers adds it up, and so must we."""


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """How sequences are searched for.

    Attributes:
        width: how many sequences go on per prompt; 1: no search.
        length_penalty: exponent of the length that divides the score of an ended sequence; above 0 favours long ones.
        early_stopping: stop for a prompt as soon as `width` sequences have ended; False: when none can become better.
    """

    width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False


class Beams:
    """The sequences of a search: those that go on, and the best that have ended.

    Attributes:
        going: tokens of the sequences that go on, (batch, width, longest), the best first; later places are filled.
        scores: sums of their log probabilities, (batch, width).
        length: how many tokens they have.
        over: whether the search is over.
    """

    def __init__(
        self, prompts: torch.Tensor, options: BeamOptions, *, longest: int, ends: torch.Tensor, filler: int
    ) -> None:
        """Begin with one sequence per prompt.

        Args:
            prompts: tokens to begin with, (batch, length).
            options: see `BeamOptions`.
            longest: the most tokens of a sequence, prompt and all.
            ends: tokens that end a sequence.
            filler: token after the end of a sequence.
        """
        self._options, self._ends, self._longest = options, ends, longest
        batch, self._prompt = prompts.shape
        self.length, self.over = self._prompt, False
        self.going = prompts.new_full((batch, options.width, longest), filler)
        self.going[:, :, : self.length] = prompts[:, None]
        self.scores = torch.zeros((batch, options.width), device=prompts.device)
        self.scores[:, 1:] = _WORST
        self._ended = self.going.clone()
        self._ended_scores = torch.full_like(self.scores, _WORST)
        self._ended_lengths = torch.zeros_like(self.scores, dtype=torch.int64)
        self._has_ended = torch.zeros_like(self.scores, dtype=torch.bool)
        self._improves = torch.ones_like(self._has_ended[:, :1])
        # If every best token ends a sequence, others are left to go on with.
        self._kept = max(2, 1 + len(ends)) * options.width

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of sequences that go on, (batch * width, length)."""
        return self.going[:, :, : self.length].flatten(0, 1)

    def advance(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Add a token to every sequence; return, per sequence that goes on, the index of the one that it continues.

        Args:
            log_probabilities: of the next tokens, (batch * width, vocabulary).
        """
        batch, width = self.scores.shape
        vocabulary = log_probabilities.shape[-1]
        sums = log_probabilities.view(batch, width, -1) + self.scores[:, :, None]
        best, places = sums.flatten(1).topk(self._kept)
        origins, tokens = places // vocabulary, places % vocabulary
        candidates = _chosen(self.going, origins)
        candidates[:, :, self.length] = tokens
        self.length += 1
        ends = torch.isin(tokens, self._ends)
        if self.length >= self._longest:
            ends = torch.ones_like(ends)
        self._keep_ended(candidates, best, ends)
        unended = best + ends.float() * _WORST
        chosen = unended.topk(width).indices
        self.going, self.scores = _chosen(candidates, chosen), _chosen(unended, chosen)
        self._look_ahead(all_end=bool(ends.all()))
        rows = origins + torch.arange(batch, device=origins.device)[:, None] * width
        return _chosen(rows, chosen).flatten()

    def _keep_ended(self, candidates: torch.Tensor, scores: torch.Tensor, ends: torch.Tensor) -> None:
        """Keep the best of the sequences that have ended, of which only the `width` best candidates may be one."""
        width = self._options.width
        ends = ends & (torch.arange(ends.shape[1], device=ends.device) < width)
        full = self._has_ended.all(1, keepdim=True) & self._options.early_stopping
        scores = scores / ((self.length - self._prompt) ** self._options.length_penalty)
        scores = scores + full.float() * _WORST
        scores = scores + (~self._improves).float() * _WORST
        scores = scores + (~ends) * _WORST
        lengths = torch.full_like(ends, self.length, dtype=torch.int64)
        scores = torch.cat((self._ended_scores, scores), 1)
        chosen = scores.topk(width).indices
        self._ended_scores = _chosen(scores, chosen)
        self._ended = _chosen(torch.cat((self._ended, candidates), 1), chosen)
        self._ended_lengths = _chosen(torch.cat((self._ended_lengths, lengths), 1), chosen)
        self._has_ended = _chosen(torch.cat((self._has_ended, ends), 1), chosen)

    def _look_ahead(self, *, all_end: bool) -> None:
        """Find out whether a sequence that goes on can become better than those that have ended."""
        possible = self.scores[:, :1] / ((self.length - self._prompt) ** self._options.length_penalty)
        worst = torch.where(self._has_ended, self._ended_scores.amin(1, keepdim=True), _WORST)
        self._improves = self._improves & (possible > worst).any(1, keepdim=True)
        full = self._options.early_stopping and bool(self._has_ended.all())
        self.over = all_end or full or not bool(self._improves.any())

    def best(self) -> torch.Tensor:
        """Return the best ended sequence per prompt, (batch, length of the longest)."""
        return self._ended[:, 0, : int(self._ended_lengths[:, 0].max())]


def _chosen(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what of `values`, (batch, n) or (batch, n, length), stands at `places`, (batch, m)."""
    return values.gather(1, places) if values.dim() == 2 else values.take_along_dim(places[:, :, None], 1)
