"""Generate tokens with a loaded bundle: a loop over its programs `prefill` and `decode`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.generation.decoder import Decode, Decoder
from aotexport_runtime.rewrite.names import random_nodes

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes sequences, (batch, length), and scores of their next tokens, (batch, vocabulary), and returns other scores."""


class Streamer(Protocol):
    """Takes tokens as they come; those of transformers are."""

    def put(self, value: torch.Tensor) -> Any:
        """Take the prompt first, (batch, length), and then a token per sequence, (batch)."""

    def end(self) -> Any:
        """Hear that no more tokens come."""


def generate(
    module: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    start: int | None = None,
    streamer: Streamer | None = None,
    logits_processor: Sequence[Processor] = (),
) -> torch.Tensor:
    """Return sequences of tokens, (batch, length): of a causal model, with the prompts before them.

    They are those that `generate` of transformers gives for the model, by a draw with the same seed.

    Args:
        module: a bundle of `aotexport --recipe`, loaded; in eval mode, if the model has dropout.
        input_ids: prompts, or what an encoder reads, (batch, length); shorter prompts are padded on the left.
        attention_mask: 0 for padding, like `input_ids`; None: there is none.
        max_new_tokens: the most tokens per sequence.
        do_sample: draw by torch's default generator; False: take the best.
        temperature: divides the scores before a draw; above 0.
        top_k: draw from so many best tokens; None: from all.
        top_p: draw from the best tokens that have this much of the probability; above 0, at most 1.
        repetition_penalty: divides the positive scores of tokens that the sequence has, and multiplies the negative;
            above 0.
        num_beams: how many sequences a search follows per prompt; 1: none is made. A search draws nothing.
        length_penalty: exponent of the length that divides the score of an ended sequence; above 0 favours long ones.
        early_stopping: end a search for a prompt as soon as `num_beams` sequences have ended; False: when none can
            become better.
        eos: token, or tokens, that end a sequence; None: none does.
        pad: token after the end of a sequence; None: the first of `eos`.
        start: token that the decoder of an encoder-decoder model begins with; None: the model is causal.
        streamer: hears of tokens as they come; None: nobody does.
        logits_processor: functions of sequences, padding too, and scores to scores, called in order after the penalty;
            those of transformers are. A search has logarithms of probabilities for scores.

    Raises:
        ArgumentInvalid: an argument is out of its range, or the bundle has no such programs.
    """
    numbers = (do_sample, temperature, top_k, top_p, repetition_penalty, num_beams, length_penalty)
    choice = Choice(*numbers, early_stopping, tuple(logits_processor))
    _check(module, input_ids, start, max_new_tokens, choice)
    if num_beams > 1 and (do_sample or streamer is not None):
        raise ArgumentInvalid(f"`{'do_sample' if do_sample else 'streamer'}` does not go with `num_beams` above 1")
    ends = input_ids.new_tensor([eos] if isinstance(eos, int) else [] if eos is None else list(eos))
    prompt = _Prompt(module, input_ids, attention_mask, start)
    with torch.no_grad():
        if num_beams > 1:
            return _searched(prompt, choice, max_new_tokens, ends, pad)
        return _continued(prompt, choice, max_new_tokens, ends, pad, streamer)


class _Prompt:
    """What a model has read so far, which `mask` tells; `sequences` begin with it, and with `padding` at the left."""

    def __init__(self, module: Any, ids: torch.Tensor, mask: torch.Tensor | None, start: int | None) -> None:
        self.module, self.sequences = module, ids
        self.prefill, self.step = (_called(module, name) for name in ("prefill", "decode"))
        self.mask = torch.ones_like(ids) if mask is None else mask
        self.padding = (self.mask != 0).int().argmax(1)
        self.first: tuple[torch.Tensor, ...] = (ids, self.mask)
        # A decoder's sequences are not those that the mask is of.
        self._grows = start is None
        if start is not None:
            self.sequences, self.padding = ids.new_full((len(ids), 1), start), self.mask.new_zeros(len(ids))
            self.first = (ids, self.mask, self.sequences)

    def decode(self, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Return the scores after `tokens`, (batch), and the longer cache."""
        if self._grows:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        return self.step(tokens[:, None], self.mask, cache)


def _called(module: Any, name: str) -> Decode:
    """Return a program as a function: in train mode that of evaluation, where the model draws nothing in either."""
    if getattr(module, "training", False) and hasattr(module, "bundle"):
        programs = [
            program for each in module.bundle.program_names if (program := module.bundle.program(each)).mode == "train"
        ]
        graphs = [module.bundle.graph(program.name, program.forward.file) for program in programs]
        if graphs and not any(map(random_nodes, graphs)):
            return module.program(name)
    return getattr(module, name)


def _continued(
    prompt: _Prompt, choice: Choice, max_new_tokens: int, ends: torch.Tensor, pad: int | None, streamer: Streamer | None
) -> torch.Tensor:
    """Return the prompts with a token after the other."""
    filler = pad if pad is not None or not len(ends) else int(ends[0])
    sequences = prompt.sequences
    going = torch.ones(len(sequences), dtype=torch.bool, device=sequences.device)
    if streamer is not None:
        streamer.put(sequences.cpu())
    scores, cache = prompt.prefill(*prompt.first)
    prompt.step = Decoder(prompt.module, prompt.step, max_new_tokens)
    for left in reversed(range(max_new_tokens)):
        tokens = choice.chosen(choice.processed(sequences, prompt.padding, scores.float()))
        if filler is not None:
            tokens = tokens.where(going, filler)
        sequences = torch.cat([sequences, tokens[:, None]], 1)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if len(ends):
            going &= ~torch.isin(tokens, ends)
        if not left or (len(ends) and not going.any()):
            break
        scores, cache = prompt.decode(tokens, cache)
    if streamer is not None:
        streamer.end()
    return sequences


def _searched(
    prompt: _Prompt, choice: Choice, max_new_tokens: int, ends: torch.Tensor, pad: int | None
) -> torch.Tensor:
    """Return the best sequence of each prompt."""
    longest = prompt.sequences.shape[1] + max_new_tokens
    # transformers takes a padding token 0 for none.
    filler = (pad or int(ends[0])) if len(ends) else -1
    beams = _Beams(prompt.sequences, choice, longest=longest, ends=ends, filler=filler)
    scores, cache = prompt.prefill(*prompt.first)
    rows = torch.arange(len(scores), device=scores.device).repeat_interleave(choice.num_beams)
    scores, prompt.mask, prompt.padding = scores[rows], prompt.mask[rows], prompt.padding[rows]
    cache = _rows_of(cache, rows)
    while True:
        likely = scores.float().log_softmax(-1)
        rows = beams.advance(choice.processed(beams.tokens, prompt.padding, likely))
        if beams.over:
            return beams.best()
        scores, cache = prompt.decode(beams.tokens[:, -1], _rows_of(cache, rows))


def _rows_of(cache: Any, rows: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Return keys and values of these rows of a batch."""
    return [tuple(part.index_select(0, rows) for part in layer) for layer in cache]


def _check(module: Any, input_ids: torch.Tensor, start: int | None, max_new_tokens: int, choice: Choice) -> None:
    if not callable(getattr(module, "prefill", None)) or not callable(getattr(module, "decode", None)):
        raise ArgumentInvalid(
            "the bundle has no programs `prefill` and `decode`; export the model by `aotexport --recipe causal-lm` or "
            "`--recipe seq2seq`"
        )
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        raise ArgumentInvalid(f"`input_ids` must be int64 of two axes, got {input_ids.dtype} of {input_ids.dim()}")
    ranges = ("temperature", "top_k", "top_p", "repetition_penalty", "num_beams")
    values = {"max_new_tokens": max_new_tokens, **{name: getattr(choice, name) for name in ranges}}
    for name, value in values.items():
        if name == "top_k" and value is None:
            continue
        if value <= 0 or (name == "top_p" and value > 1):
            range_ = {"top_k": "None or above 0", "top_p": "above 0, and at most 1"}.get(name, "above 0")
            raise ArgumentInvalid(f"`{name}` must be {range_}, got {value}")
    is_seq2seq = "decoder_input_ids" in inspect.signature(module.prefill).parameters
    if is_seq2seq != (start is not None):
        raise ArgumentInvalid(
            "the model has an encoder; give the token that its decoder begins with, `start`"
            if is_seq2seq
            else "`start` is for encoder-decoder models, and this one is causal"
        )


_NEVER = -float("inf")
_WORST = -1.0e9
"""Score of what must not be chosen; transformers adds it up, and so must we."""


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen; see `generate`."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    processors: tuple[Processor, ...] = ()

    def processed(self, sequences: torch.Tensor, padding: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (batch, vocabulary), with the penalty, and what the processors make of them."""
        scores = self._penalised(sequences, padding, scores)
        for processor in self.processors:
            scores = processor(sequences, scores)
        return scores

    def _penalised(self, sequences: torch.Tensor, padding: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with the penalty for tokens of `sequences` behind their padding."""
        if self.repetition_penalty == 1.0:
            return scores
        places = torch.arange(sequences.shape[1], device=sequences.device)
        # Tokens that have no score, and padding, share one more place.
        none = scores.shape[-1]
        own = sequences.clamp(max=none).masked_fill(places < padding[:, None], none)
        seen = scores.new_zeros((len(scores), none + 1), dtype=torch.bool).scatter(1, own, True)[:, :none]
        penalised = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
        return torch.where(seen, penalised, scores)

    def chosen(self, scores: torch.Tensor, source: torch.Generator | None = None) -> torch.Tensor:
        """Return a token per row of `scores`, (batch, vocabulary), drawn by `source`; None: by torch's default one."""
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(self.probabilities(scores), num_samples=1, generator=source).squeeze(1)

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the probability of each token, (batch, vocabulary), by the limits of the choice."""
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
        return scores.softmax(-1)


class _Beams:
    """The sequences of a beam search as `generate` of transformers 5 makes it: those that go on, the best ended ones.

    Attributes:
        going: tokens of the sequences that go on, (batch, width, longest), the best first; later places are filled.
        scores: sums of their log probabilities, (batch, width).
        length: how many tokens they have.
        over: whether the search is over.
    """

    def __init__(self, prompts: torch.Tensor, choice: Choice, *, longest: int, ends: torch.Tensor, filler: int) -> None:
        self._choice, self._ends, self._longest = choice, ends, longest
        batch, self._prompt = prompts.shape
        self.length, self.over = self._prompt, False
        self.going = prompts.new_full((batch, choice.num_beams, longest), filler)
        self.going[:, :, : self.length] = prompts[:, None]
        self.scores = torch.zeros((batch, choice.num_beams), device=prompts.device)
        self.scores[:, 1:] = _WORST
        self._ended = self.going.clone()
        self._ended_scores = torch.full_like(self.scores, _WORST)
        self._ended_lengths = torch.zeros_like(self.scores, dtype=torch.int64)
        self._has_ended = torch.zeros_like(self.scores, dtype=torch.bool)
        self._improves = torch.ones_like(self._has_ended[:, :1])
        # If every best token ends a sequence, others are left to go on with.
        self._kept = max(2, 1 + len(ends)) * choice.num_beams

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of sequences that go on, (batch * width, length)."""
        return self.going[:, :, : self.length].flatten(0, 1)

    def advance(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Add a token to every sequence; return, per sequence that goes on, the index of the one that it continues."""
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
        width = self._choice.num_beams
        ends = ends & (torch.arange(ends.shape[1], device=ends.device) < width)
        full = self._has_ended.all(1, keepdim=True) & self._choice.early_stopping
        scores = scores / ((self.length - self._prompt) ** self._choice.length_penalty)
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
        possible = self.scores[:, :1] / ((self.length - self._prompt) ** self._choice.length_penalty)
        worst = torch.where(self._has_ended, self._ended_scores.amin(1, keepdim=True), _WORST)
        self._improves = self._improves & (possible > worst).any(1, keepdim=True)
        full = self._choice.early_stopping and bool(self._has_ended.all())
        self.over = all_end or full or not bool(self._improves.any())

    def best(self) -> torch.Tensor:
        """Return the best ended sequence per prompt, (batch, length of the longest)."""
        return self._ended[:, 0, : int(self._ended_lengths[:, 0].max())]


def _chosen(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what of `values`, (batch, n) or (batch, n, length), stands at `places`, (batch, m)."""
    return values.gather(1, places) if values.dim() == 2 else values.take_along_dim(places[:, :, None], 1)
