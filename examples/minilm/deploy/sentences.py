"""Sentences to embed and pairs to train on, and how they become tokens. Needs tokenizers, not transformers."""

from __future__ import annotations

import os

import torch
from tokenizers import Tokenizer

SENTENCES = (
    "A bundle holds a model as data.",
    "The weather in the mountains changes quickly in autumn.",
    "She plays the violin.",
    "Stock prices fell after the announcement, although analysts had expected the opposite.",
    "Rain is likely tonight.",
    "Numbers.",
)

PAIRS = (
    ("How do I reset my password?", "I forgot my password and cannot log in."),
    ("The parcel has not arrived.", "My delivery is late."),
    ("Can I get a refund?", "I want my money back."),
    ("The app crashes when it starts.", "The program stops as soon as I open it."),
    ("Where is the nearest station?", "How do I get to the closest train stop?"),
    ("The soup is too salty.", "There is too much salt in this broth."),
    ("Turn down the music.", "Please make the song less loud."),
    ("He bought a new bicycle.", "He has a bike that he just purchased."),
    ("The meeting is postponed.", "We will meet at a later date."),
    ("My phone does not charge.", "The battery of my telephone stays empty."),
    ("The road is closed.", "You cannot drive through this street."),
    ("Open the window.", "Let some fresh air in."),
)


def tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer in the file at `path`; it pads to the longest sentence and cuts at 256 tokens."""
    loaded = Tokenizer.from_file(str(path))
    loaded.enable_padding()
    loaded.enable_truncation(256)
    return loaded


def tokens(loaded: Tokenizer, sentences: list[str]) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, both `[len(sentences), longest]`."""
    encodings = loaded.encode_batch(sentences)
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
    }
