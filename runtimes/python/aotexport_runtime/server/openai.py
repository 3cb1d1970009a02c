"""Requests and answers of OpenAI's interface for texts, from and to bytes; knows no server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from aotexport_runtime.server.refusals import CODES, Refusal

_Zero = Annotated[float, Meta(ge=0, le=0)]
_Stop = str | Annotated[list[str], Meta(max_length=16)] | None
_Text = Annotated[str, Meta(min_length=1)]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_Several = Annotated[list[Any], Meta(min_length=1)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream has beside its pieces of text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both requests have; those whose type is `None` or a number alone are known, and not supported otherwise.

    Attributes:
        temperature: 0: the likeliest token each; None: the model's own, else 1, as of `top_p` and `top_k`.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = 1
    stop: _Stop = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences that are not empty."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]


class Completion(Asked, kw_only=True):
    """A request to go on with a text, or several; each may be given as tokens."""

    prompt: str | _Several
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt (`Refusal`: they are no texts and no lists of tokens)."""
        try:
            return [msgspec.convert(self.prompt, _Tokens | _Text)]
        except msgspec.ValidationError:
            pass
        try:
            return msgspec.convert(self.prompt, list[_Tokens | _Text])
        except msgspec.ValidationError:
            text = "`prompt`: expected a text, a list of tokens, or a list of either; none of them empty"
            raise Refusal(text) from None


class Chat(Asked, kw_only=True):
    """A request for the next message of a chat."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: Literal[False] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The messages, contents of several parts as one text (`Refusal`: one is no text)."""
        return [{**each, "content": _joined(index, each.get("content"))} for index, each in enumerate(self.messages)]


def _joined(index: int, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )
    if not is_text:
        raise Refusal(f"`messages[{index}].content`: expected a text, or a list of parts of the type `text`")
    return "\n".join(part["text"] for part in parts)


Kind = TypeVar("Kind", bound=Asked)


def read_asked(body: bytes | bytearray, kind: type[Kind]) -> Kind:
    """Return a request for text.

    Raises:
        Refusal: the body is none, or asks for what is not supported.
    """
    try:
        asked = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"the request is not one that is served here: {error}") from None
    if isinstance(asked, Completion) and asked.best_of not in (None, asked.n or 1):
        raise Refusal("`best_of`: more texts than `n` are not made")
    if asked.stream_options is not None and not asked.stream:
        raise Refusal("`stream_options` is for streams; set `stream`")
    return asked


def described_error(refusal: Refusal) -> dict[str, Any]:
    """Return a refusal as clients of OpenAI read it."""
    status = CODES[refusal.kind][0]
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if refusal.kind == "not_found" else refusal.kind
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": code}}


@dataclass(frozen=True)
class Scored:
    """A token as text, and the logarithm of its probability; `best`: the likeliest ones."""

    text: str
    logprob: float
    best: tuple[tuple[str, float], ...]


@dataclass
class Written:
    """A piece of one of the texts of an answer.

    Attributes:
        index: of the text.
        finish: why the text ends with the piece: `stop`, `length`; None: it goes on.
    """

    index: int
    text: str = ""
    scored: list[Scored] | None = None
    finish: str | None = None


@dataclass(kw_only=True)
class Answering:
    """The answer to a request, in pieces or whole.

    Attributes:
        model: as the request names it.
        is_chat: whether the request is one of a chat.
        prompt_tokens: of all prompts; `tokens`: of all texts, so far.
    """

    model: str
    is_chat: bool
    prompt_tokens: int = 0
    tokens: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Written], count: int) -> bytes:
        """Return the answer with `count` texts, of which these are all the pieces, in order."""
        texts = [Written(index) for index in range(count)]
        for piece in pieces:
            text = texts[piece.index]
            text.text, text.finish = text.text + piece.text, piece.finish or text.finish
            if piece.scored is not None:
                text.scored = (text.scored or []) + piece.scored
        choices = [self._choice(text, "message") for text in texts]
        return msgspec.json.encode(self._head("") | {"choices": choices, "usage": self._usage()})

    def first(self, count: int) -> Iterator[bytes]:
        """Yield the events before the texts of a stream: a chat's tell who speaks."""
        for index in range(count if self.is_chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, piece: Written) -> bytes:
        """Return the event of a piece."""
        return self._event([self._choice(piece, "delta")])

    def last(self, options: StreamOptions | None) -> bytes:
        """Return the events that end a stream."""
        usage = self._event([], usage=self._usage()) if options is not None and options.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[Any], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode(self._head(".chunk") | {"choices": choices, **more}) + b"\n\n"

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl-", "chat.completion" + suffix) if self.is_chat else ("cmpl-", "text_completion")
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, int]:
        whole = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": whole}

    def _choice(self, text: Written, name: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": text.index, "logprobs": None, "finish_reason": text.finish}
        if not self.is_chat:
            scored = text.scored and {
                "tokens": [each.text for each in text.scored],
                "token_logprobs": [each.logprob for each in text.scored],
                # Of tokens that read the same, parts of characters, the likeliest.
                "top_logprobs": [dict(reversed(each.best)) for each in text.scored],
                "text_offset": None,
            }
            return choice | {"text": text.text, "logprobs": scored}
        content: dict[str, Any] = {"content": text.text}
        choice[name] = content | {"role": "assistant", "refusal": None} if name == "message" else content
        if text.scored is not None:
            choice["logprobs"] = {"content": [_entry(each) for each in text.scored], "refusal": None}
        return choice


def _entry(scored: Scored) -> dict[str, Any]:
    best = [_one(text, logprob) for text, logprob in scored.best]
    return {**_one(scored.text, scored.logprob), "top_logprobs": best}


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
