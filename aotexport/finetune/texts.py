"""Texts to tokens: by a file of the `tokenizers` library, or byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aotexport.errors import DataInvalid

BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of UTF-8."""


class Tokenizer(Protocol):
    """Turns texts to tokens."""

    @property
    def padding(self) -> int:
        """The token that fills up short texts."""
        ...

    def tokens(self, texts: Sequence[str], *, marked: bool) -> list[list[int]]:
        """Return the tokens of each text.

        Args:
            texts: to read.
            marked: with the tokens that mark begin and end.
        """
        ...


class Bytes:
    """The bytes of UTF-8 as tokens."""

    padding = 0

    def tokens(self, texts: Sequence[str], *, marked: bool) -> list[list[int]]:
        """Return the bytes of each text; there are no marks."""
        return [list(text.encode()) for text in texts]


@dataclass(frozen=True)
class File:
    """A file of the `tokenizers` library."""

    loaded: Any
    padding: int

    def tokens(self, texts: Sequence[str], *, marked: bool) -> list[list[int]]:
        """Return the tokens of each text."""
        encoded = self.loaded.encode_batch(list(texts), add_special_tokens=marked)
        return [encoding.ids for encoding in encoded]


def tokenizer_of(source: str | None, need: str) -> Tokenizer:
    """Return a tokenizer.

    Args:
        source: path of a `tokenizer.json`, or `bytes`; None: none was given.
        need: what needs it, for messages.

    Raises:
        DataInvalid: there is none, it cannot be read, or the library is missing.
    """
    if source is None:
        raise DataInvalid(f"{need} is text: give the model's tokenizer (--tokenizer tokenizer.json, or bytes)")
    if source == BYTES:
        return Bytes()
    try:
        import tokenizers
    except ImportError:
        raise DataInvalid("--tokenizer needs the library tokenizers: pip install 'aotexport[finetune]'") from None
    try:
        loaded = tokenizers.Tokenizer.from_file(source)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise DataInvalid(f"--tokenizer: {source} cannot be read: {str(error).splitlines()[0]}") from None
    padding = (loaded.padding or {}).get("pad_id", 0)
    loaded.no_padding()
    loaded.no_truncation()
    return File(loaded, padding)
