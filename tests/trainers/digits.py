"""Scikit-learn's handwritten digits, as pixels and as text of 64 words, and models for both."""

import functools
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import aotexport

WORDS, LENGTH, CLASSES = 17, 64, 10


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, `[1797, 64]` integers from 0 to 16, and their labels."""
    data = load_digits()
    return torch.from_numpy(data.data).to(torch.int64), torch.from_numpy(data.target)


def pixels(start: int, stop: int) -> TensorDataset:
    images, labels = digits()
    return TensorDataset(images[start:stop].to(torch.float32) / 16, labels[start:stop])


class Text(Dataset[dict[str, Any]]):
    """Digits read word by word, in columns as model libraries name them, with one that no model takes."""

    def __init__(self, start: int, stop: int) -> None:
        self.rows = range(start, stop)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        images, labels = digits()
        row = self.rows[index]
        return {"input_ids": images[row], "labels": labels[row], "writer": f"row {row}"}


class Classifier(nn.Sequential):
    """Logits of images; batch norm and dropout make train and eval mode differ."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(LENGTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES))


def make_reader() -> BertForSequenceClassification:
    """Return a small BERT that classifies text, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes)
    )


def export_classifier(path: Path) -> Path:
    """Export the classifier for any batch."""
    batch = torch.export.Dim("batch", min=1, max=512)
    example = pixels(0, 8).tensors[:1]
    aotexport.export(Classifier(), example, output=path, dynamic_shapes=({0: batch},), verify=False)
    return path


def export_reader(path: Path) -> Path:
    """Export the reader with its loss, for any batch."""
    batch = torch.export.Dim("batch", min=1, max=512)
    images, labels = digits()
    example = {"input_ids": images[:8], "labels": labels[:8]}
    shapes = {"input_ids": {0: batch}, "labels": {0: batch}}
    aotexport.export(make_reader(), (), example, output=path, dynamic_shapes=shapes, verify=False)
    return path


def make_writer() -> GPT2LMHeadModel:
    """Return a small GPT-2, whose tokens are read and scored by one weight, always with the same weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64))


def export_writer(path: Path) -> Path:
    """Export the writer by a recipe, without the programs of its base model."""
    recipe = aotexport.recipe("causal-lm", make_writer())
    aotexport.export(recipe.model, (), programs=recipe.programs[:4], output=path, verify=False)
    return path
