"""Generate tokens with a loaded bundle: a loop over its programs `prefill` and `decode`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.generation.choosing import Choice


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
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    start: int | None = None,
    streamer: Streamer | None = None,
) -> torch.Tensor:
    """Return sequences of tokens, (batch, length): of a causal model, with the prompts before them.

    They are those that `generate` of transformers gives for the model, by a draw with the same seed.

    Args:
        module: a bundle of `aotexport --recipe`, loaded, in eval mode.
        input_ids: prompts, or what an encoder reads, (batch, length); shorter prompts are padded on the left.
        attention_mask: 0 for padding, like `input_ids`; None: there is none.
        max_new_tokens: the most tokens per sequence.
        do_sample: see `Choice`, as for the next four.
        temperature: above 0.
        top_k: None or above 0.
        top_p: above 0, at most 1.
        repetition_penalty: above 0.
        eos: token, or tokens, that end a sequence; None: none does.
        pad: token after the end of a sequence; None: the first of `eos`.
        start: token that the decoder of an encoder-decoder model begins with; None: the model is causal.
        streamer: hears of tokens as they come; None: nobody does.

    Raises:
        ArgumentInvalid: an argument is out of its range, or the bundle has no such programs.
    """
    _check(module, input_ids, max_new_tokens, temperature, top_k, top_p, repetition_penalty, start)
    ends = input_ids.new_tensor([eos] if isinstance(eos, int) else [] if eos is None else list(eos))
    filler = pad if pad is not None or not len(ends) else int(ends[0])
    choice = Choice(
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
    )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    sequences = input_ids if start is None else input_ids.new_full((len(input_ids), 1), start)
    padding = (mask != 0).int().argmax(1) if start is None else mask.new_zeros(len(mask))
    going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    if streamer is not None:
        streamer.put(sequences.cpu())
    with torch.no_grad():
        scores, cache = module.prefill(input_ids, mask, *(() if start is None else (sequences,)))
        for left in reversed(range(max_new_tokens)):
            tokens = choice.chosen(choice.penalised(sequences, padding, scores.float()))
            if filler is not None:
                tokens = tokens.where(going, filler)
            sequences = torch.cat([sequences, tokens[:, None]], 1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if len(ends):
                going &= ~torch.isin(tokens, ends)
            if not left or (len(ends) and not going.any()):
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1) if start is None else mask
            scores, cache = module.decode(tokens[:, None], mask, cache)
    if streamer is not None:
        streamer.end()
    return sequences


def _check(
    module: Any,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    repetition_penalty: float,
    start: int | None,
) -> None:
    if not callable(getattr(module, "prefill", None)) or not callable(getattr(module, "decode", None)):
        raise ArgumentInvalid(
            "the bundle has no programs `prefill` and `decode`; export the model by `aotexport --recipe causal-lm` or "
            "`--recipe seq2seq`"
        )
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        raise ArgumentInvalid(f"`input_ids` must be int64 of two axes, got {input_ids.dtype} of {input_ids.dim()}")
    for name, value, fits, range_ in (
        ("max_new_tokens", max_new_tokens, max_new_tokens > 0, "above 0"),
        ("temperature", temperature, temperature > 0, "above 0"),
        ("top_k", top_k, top_k is None or top_k > 0, "None or above 0"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0, and at most 1"),
        ("repetition_penalty", repetition_penalty, repetition_penalty > 0, "above 0"),
    ):
        if not fits:
            raise ArgumentInvalid(f"`{name}` must be {range_}, got {value}")
    is_seq2seq = "decoder_input_ids" in inspect.signature(module.prefill).parameters
    if is_seq2seq != (start is not None):
        raise ArgumentInvalid(
            "the model has an encoder; give the token that its decoder begins with, `start`"
            if is_seq2seq
            else "`start` is for encoder-decoder models, and this one is causal"
        )
