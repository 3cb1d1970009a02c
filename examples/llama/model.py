"""A tiny Llama of the transformers library: rotary positions, grouped queries, RMS norm, gated feed-forward."""

from typing import Any

import torch
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    """Return the untrained language model; every call gives the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def example_inputs() -> dict[str, Any]:
    """Return the example call; with labels, the output has a loss."""
    tokens = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


_sizes = {0: Dim("batch", min=1, max=64), 1: Dim("sequence", min=2, max=128)}
dynamic_shapes = {"input_ids": _sizes, "labels": _sizes}
