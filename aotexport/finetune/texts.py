"""Texts to tokens: by a file of the `tokenizers` library, or byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotexport.errors import DataInvalid

BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of UTF-8."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts to tokens.

    Attributes:
        tokens: returns the tokens of each text; `marked`: with the tokens that mark begin and end.
        padding: the token that fills up short texts.
    """

    tokens: Callable[..., list[list[int]]]
    padding: int = 0


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
        return Tokenizer(lambda texts, *, marked: [list(text.encode()) for text in texts])
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

    def tokens(texts: Sequence[str], *, marked: bool) -> list[list[int]]:
        return [encoding.ids for encoding in loaded.encode_batch(list(texts), add_special_tokens=marked)]

    return Tokenizer(tokens, padding)
