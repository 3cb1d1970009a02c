"""Inputs of the models of transformers, which `transformers.json` lists."""

from dataclasses import dataclass
from typing import Any

import torch

BATCH = 3
VOCABULARY = 100
LENGTH = 10
SIDE = 32
SOUND = 800


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Attributes:
        auto: name after `AutoModel` of the class that picks the architecture.
        inputs: function from a batch size to the keyword arguments of a call.
        config: fields of the configuration beside those that `small_configs` makes small by their names.
    """

    auto: str
    inputs: Any
    config: dict[str, Any]


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def causal() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def unmasked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": _tokens(BATCH, LENGTH)}


def translation() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": _tokens(BATCH, 6)}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH,))}


def pictures_alone() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE)}


def segments() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(5, (BATCH, SIDE, SIDE))}


def captions() -> dict[str, Any]:
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "return_loss": True, **pictures_alone()}


def sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(5, (BATCH,))}


def transcripts() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SOUND), "labels": torch.randint(1, 20, (BATCH, 6))}


def spectra() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 32, 16), "labels": torch.randint(5, (BATCH,))}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": _tokens(BATCH, 6)}


def long_speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 40, 16), "labels": _tokens(BATCH, 6)}
