"""A small GPT-2 of the transformers library over bytes, as `aotexport` takes it."""

from typing import Any

import torch
from torch.export import Dim
from transformers import GPT2Config, GPT2LMHeadModel


def model() -> GPT2LMHeadModel:
    """Return the untrained language model; every call gives the same weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    network = GPT2LMHeadModel(config)
    network.loss_type = "ForCausalLM"  # transformers finds none in the name of this class, and warns
    return network


def example_inputs() -> dict[str, Any]:
    """Return the example call; with labels, the output has a loss."""
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


_sizes = {0: Dim("batch", min=1, max=64), 1: Dim("sequence", min=2, max=128)}
dynamic_shapes = {"input_ids": _sizes, "labels": _sizes}
