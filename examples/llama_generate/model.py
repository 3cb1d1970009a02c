"""One step of generation with a tiny Llama: keys and values of the tokens so far go in, and come out longer."""

from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

LAYERS = 2


def network() -> LlamaForCausalLM:
    """Return the untrained language model; every call gives the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


class Step(nn.Module):
    """The language model, with plain tensors in place of the library's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(
        self, tokens: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return logits of the token after `tokens`, (batch, 256), and keys and values of all tokens so far."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        output = self.network(input_ids=tokens, cache=cache, use_cache=True)
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in cache.layers]


def model() -> Step:
    """Return the step."""
    return Step()


def example_inputs() -> dict[str, Any]:
    """Return the example call: 3 tokens after 5."""
    tokens = torch.randint(256, (2, 3), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "past": [(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16)) for _ in range(LAYERS)]}


programs = ["infer"]
_past = {0: Dim("batch", min=1, max=64), 2: Dim("past", min=0, max=127)}
dynamic_shapes = {
    "tokens": {0: Dim("batch", min=1, max=64), 1: Dim("new", min=1, max=128)},
    "past": [(_past, _past)] * LAYERS,
}
