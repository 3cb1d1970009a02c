"""Models of transformers that generate tokens, for the suite `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.model import Inputs, Model, tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

_VOCABULARY = 4096


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    return _sharpened(LlamaForCausalLM, LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=_VOCABULARY))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    heads = {"num_key_value_heads": 4, "head_dim": 32}
    return _sharpened(Qwen3ForCausalLM, Qwen3Config(**sizes, **heads, vocab_size=_VOCABULARY))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 8, "n_positions": 512}
    return _sharpened(GPT2LMHeadModel, GPT2Config(**sizes, vocab_size=_VOCABULARY))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8}
    return _sharpened(T5ForConditionalGeneration, T5Config(**sizes, vocab_size=_VOCABULARY, decoder_start_token_id=0))


def _sharpened(kind: Any, config: Any) -> nn.Module:
    """Return a model whose best token is clear; weights of the usual size give nearly equal scores."""
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    module = kind(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return module


def _prompt() -> Inputs:
    return (tokens(_VOCABULARY, 1, 32),)


def _prompts() -> Inputs:
    return (tokens(_VOCABULARY, 8, 32),)


def _fingerprint(ids: torch.Tensor) -> torch.Tensor:
    """Return a number that tells sequences of tokens apart."""
    import torch

    return (ids.double() * torch.arange(1, ids.shape[1] + 1)).sum()


_KINDS = (
    ("llama", "Llama, 6 layers of 256", _llama),
    ("qwen3", "Qwen3, 6 layers of 256", _qwen3),
    ("gpt2 generates", "GPT-2, 6 layers of 256", _gpt2),
    ("t5", "T5, 4 and 4 layers of 256", _t5),
)

GENERATING = tuple(
    Model(f"{name}{batch}", f"{sizes}, {prompts}", make, inputs, _fingerprint, ("generate",))
    for name, sizes, make in _KINDS
    for batch, prompts, inputs in (("", "a prompt of 32 tokens", _prompt), (" x 8", "8 prompts", _prompts))
)
"""Called with prompts; the output is what a system generates."""
