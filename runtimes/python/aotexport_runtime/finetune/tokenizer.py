"""Tokenizers: a directory that transformers has written, a `tokenizer.json`, or the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotexport_runtime.errors import ArgumentInvalid, DataInvalid, NotSupported
from aotexport_runtime.schema.manifest import TOKENIZER_FILES
from aotexport_runtime.serving import tokenizer as runtime

BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of UTF-8."""
Span = tuple[int, int]
"""Where a part of a text begins, and where it ends, in characters."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text.

    Attributes:
        ids: one number a token.
        spans: the characters that a token stands for; empty at a mark that is not in the text.
        words: the number of the word that a token belongs to, where the text came in words; None at marks.
    """

    ids: list[int]
    spans: Sequence[Span] = ()
    words: Sequence[int | None] = ()


class Tokenizer:
    """Turns texts to tokens.

    Attributes:
        padding: the token that fills up short texts.
    """

    def __init__(self, source: str | None, need: str) -> None:
        """Read a tokenizer.

        Args:
            source: a directory that `save_pretrained` wrote, the path of a `tokenizer.json`, or `bytes`; None: no
                tokenizer was given.
            need: what needs it, for messages.

        Raises:
            DataInvalid: there is none, it cannot be read, or a package for it is missing.
        """
        if source is None:
            raise DataInvalid(f"{need} is text: give the model's tokenizer (--tokenizer DIR, tokenizer.json or bytes)")
        self._source = source
        self._own = None if source == BYTES else _read(source)
        self.padding = 0 if self._own is None else self._own.padding

    @property
    def end(self) -> str:
        """The text of the token that ends an answer, which bytes have not; `DataInvalid`: the files name none."""
        found = "" if self._own is None else self._own.special("eos_token")
        if self._own is not None and not found:
            raise DataInvalid(
                f"--tokenizer: {self._source} names no `eos_token`, with which an answer ends: give the directory that "
                "`save_pretrained` of the model's tokenizer wrote, or add it to tokenizer_config.json"
            )
        return found

    def encode(self, texts: Sequence[Any], *, marked: bool, in_words: bool = False) -> list[Encoded]:
        """Return the tokens of texts.

        Args:
            texts: one string a text, or with `in_words` its words.
            marked: add the tokens that mark begin and end.
            in_words: the texts come in words, and tokens shall know theirs.
        """
        if self._own is None:
            return [_bytes_of(text if in_words else [text]) for text in texts]
        found = self._own.encoded(texts, special=marked, in_words=in_words)
        return [Encoded(each.ids, each.offsets, each.word_ids if in_words else ()) for each in found]

    def chat(self, messages: Sequence[Any], *, asks: bool) -> str:
        """Return a conversation as the model reads it, by the chat template; `asks`: up to where an answer begins.

        Raises:
            DataInvalid: there is no template, or it refuses the conversation.
        """
        if self._own is None or not self._own.has_template:
            raise DataInvalid(
                f"--tokenizer: {self._source} has no chat template, which messages need: give the directory that "
                "`save_pretrained` of the model's tokenizer wrote"
            )
        try:
            return self._own.chat(messages, asks=asks)
        except ArgumentInvalid as error:
            raise DataInvalid(f"{error}") from None


def _read(source: str) -> runtime.Tokenizer:
    place = Path(source)
    paths = {name: place / name for name in TOKENIZER_FILES} if place.is_dir() else {TOKENIZER_FILES[0]: place}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    if TOKENIZER_FILES[0] not in files:
        raise DataInvalid(f"--tokenizer: {source} is no {TOKENIZER_FILES[0]}, nor a directory that has one")
    try:
        return runtime.Tokenizer(files)
    except NotSupported as error:
        raise DataInvalid(f"--tokenizer: {source}: {error}") from None


def _bytes_of(words: Sequence[str]) -> Encoded:
    """Return the bytes of words; of a text, which is one word, the span of each is its character."""
    found = [(byte, (place, place + 1), number) for number, word in enumerate(words)
             for place, letter in enumerate(word) for byte in letter.encode()]  # fmt: skip
    return Encoded([byte for byte, _, _ in found], [span for _, span, _ in found], [number for _, _, number in found])
