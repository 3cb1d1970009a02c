"""A tiny BERT classifier of the transformers library."""

from typing import Any

import torch
from torch.export import Dim
from transformers import BertConfig, BertForSequenceClassification


def model() -> BertForSequenceClassification:
    """Return the untrained classifier of two classes; every call gives the same weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return BertForSequenceClassification(config)


def example_inputs() -> dict[str, Any]:
    """Return the example call, with padding; with labels, the output has a loss."""
    mask = (torch.arange(16) < torch.tensor([[16], [9], [12], [5]])).long()
    tokens = torch.randint(1, 256, (4, 16), generator=torch.Generator().manual_seed(0)) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}


_batch = Dim("batch", min=1, max=64)
_sizes = {0: _batch, 1: Dim("sequence", min=2, max=128)}
dynamic_shapes = {"input_ids": _sizes, "attention_mask": _sizes, "labels": {0: _batch}}
