"""Tokenizers: a directory that transformers has written, a `tokenizer.json`, or the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotexport.errors import DataInvalid
from aotexport_runtime.errors import attempt, first_line

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
        end: the text of the token that ends an answer; empty: there is none.
    """

    def __init__(self, source: str | None, need: str) -> None:
        """Read a tokenizer.

        Args:
            source: a directory that `save_pretrained` wrote, the path of a `tokenizer.json`, or `bytes`; None: no
                tokenizer was given.
            need: what needs it, for messages.

        Raises:
            DataInvalid: there is none, it cannot be read, or transformers is missing.
        """
        if source is None:
            raise DataInvalid(f"{need} is text: give the model's tokenizer (--tokenizer DIR, tokenizer.json or bytes)")
        self._source = source
        self._own: Any = None if source == BYTES else _read(source)
        self.padding, self.end = 0, ""
        if self._own is not None:
            if not self._own.is_fast:
                raise DataInvalid(
                    f"--tokenizer: {source} has no tokenizer.json, which tells where tokens are in a text"
                )
            padding = (self._own.backend_tokenizer.padding or {}).get("pad_id", 0)
            self.padding = padding if self._own.pad_token_id is None else self._own.pad_token_id
            self.end = self._own.eos_token or ""

    def encode(self, texts: Sequence[Any], *, marked: bool, in_words: bool = False) -> list[Encoded]:
        """Return the tokens of texts.

        Args:
            texts: one string a text, or with `in_words` its words.
            marked: add the tokens that mark begin and end.
            in_words: the texts come in words, and tokens shall know theirs.
        """
        if self._own is None:
            return [_bytes_of(text if in_words else [text]) for text in texts]
        found = self._own(
            list(texts),
            add_special_tokens=marked,
            is_split_into_words=in_words,
            return_offsets_mapping=True,
            verbose=False,
        )
        words = [found.word_ids(row) if in_words else () for row in range(len(texts))]
        return [Encoded(*each) for each in zip(found["input_ids"], found["offset_mapping"], words, strict=True)]

    def chat(self, messages: Sequence[Any], *, asks: bool) -> str:
        """Return a conversation as the model reads it, by the chat template; `asks`: up to where an answer begins.

        Raises:
            DataInvalid: there is no template, or it refuses the conversation.
        """
        if not getattr(self._own, "chat_template", None):
            raise DataInvalid(
                f"--tokenizer: {self._source} has no chat template, which messages need: give the directory that "
                "`save_pretrained` of the model's tokenizer wrote"
            )
        from jinja2 import TemplateError

        try:
            return self._own.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise DataInvalid(f"the chat template refuses the conversation: {error}") from None


def _read(source: str) -> Any:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise DataInvalid("--tokenizer needs the library transformers: pip install 'aotexport[finetune]'") from None
    automatic: Any = AutoTokenizer

    def read() -> Any:
        if Path(source).is_dir():
            return automatic.from_pretrained(source, trust_remote_code=False, local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=source)

    if isinstance(found := attempt(read), Exception):
        raise DataInvalid(f"--tokenizer: {source} cannot be read: {first_line(found)}")
    return found


def _bytes_of(words: Sequence[str]) -> Encoded:
    """Return the bytes of words; of a text, which is one word, the span of each is its character."""
    found = [(byte, (place, place + 1), number) for number, word in enumerate(words)
             for place, letter in enumerate(word) for byte in letter.encode()]  # fmt: skip
    return Encoded([byte for byte, _, _ in found], [span for _, span, _ in found], [number for _, _, number in found])
