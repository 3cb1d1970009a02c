"""Architectures that ONNX models are made of in the tests, tiny and with random weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

Made = tuple[nn.Module, dict[str, Any], dict[str, Any]]
"""A model in evaluation mode, its keyword arguments, and its dynamic sizes."""

_BATCH = Dim("batch", min=1, max=64)
_SEQUENCE = Dim("sequence", min=2, max=64)


def _tokens(*names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (3, 9), generator=generator)
    return {name: ids if name == "input_ids" else torch.ones_like(ids) for name in names}, {
        name: {0: _BATCH, 1: _SEQUENCE} for name in names
    }


def bert() -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
    return (BertModel(config).eval(), *_tokens("input_ids", "attention_mask"))


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=37,
        use_cache=False,
    )
    return (LlamaForCausalLM(config).eval(), *_tokens("input_ids"))


def t5_encoder() -> Made:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return (T5EncoderModel(config).eval(), *_tokens("input_ids", "attention_mask"))


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return ResNetForImageClassification(config).eval(), {"pixel_values": pixels}, {"pixel_values": {0: _BATCH}}


MODELS: dict[str, Callable[[], Made]] = {make.__name__: make for make in (bert, llama, t5_encoder, resnet)}
