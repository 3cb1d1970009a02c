"""The choice of the next token by the scores of a model, as `generate` of transformers 5 makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NEVER = -float("inf")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How tokens are chosen.

    Attributes:
        do_sample: draw by torch's default generator; False: take the best.
        temperature: divides the scores before a draw.
        top_k: draw from so many best tokens; None: from all.
        top_p: draw from the best tokens that have this much of the probability.
        repetition_penalty: divides the positive scores of tokens that the sequence has, and multiplies the negative.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def penalised(self, sequences: torch.Tensor, padding: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (batch, vocabulary), with the penalty for tokens of `sequences`, (batch, length).

        Args:
            sequences: tokens so far.
            padding: how many tokens at the left of each sequence are padding, (batch).
            scores: of the next tokens.
        """
        if self.repetition_penalty == 1.0:
            return scores
        places = torch.arange(sequences.shape[1], device=sequences.device)
        # Tokens that have no score, and padding, share one more place.
        none = scores.shape[-1]
        own = sequences.clamp(max=none).masked_fill(places < padding[:, None], none)
        seen = scores.new_zeros((len(scores), none + 1), dtype=torch.bool).scatter(1, own, True)[:, :none]
        penalised = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        return torch.where(seen, penalised, scores)

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Return a token per row of `scores`, (batch, vocabulary)."""
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(self._limited(scores).softmax(-1), num_samples=1).squeeze(1)

    def _limited(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores by which tokens are drawn."""
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1, None]
            scores = scores.masked_fill(scores < least, _NEVER)
        if self.top_p < 1.0:
            ascending, order = scores.sort(descending=False)
            dropped = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped[..., -1:] = False
            scores = scores.masked_fill(dropped.scatter(1, order, dropped), _NEVER)
        return scores
