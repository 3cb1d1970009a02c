"""OpenAI's routes for texts, over the generators of the repository: whole answers, and streams of events.

KServe has such routes too, which import vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.account import Asked
from aotexport_runtime.server.endpoints.connections import cancel_when_gone, read_body
from aotexport_runtime.server.endpoints.plane import BundlePlane
from aotexport_runtime.server.openai import Answering, Chat, Completion, Scored, Written, described_error, read_asked
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.server.repository import Served
from aotexport_runtime.serving.batcher import Answer, Waiting
from aotexport_runtime.serving.servable import Servable
from aotexport_runtime.serving.tokenizer import Text, Tokenizer

if TYPE_CHECKING:
    from aotexport_runtime.serving.generator import Generator
    from aotexport_runtime.serving.sequences import Generation, Token

_TOKENS = 16
"""How many tokens a completion has that says nothing of it, as OpenAI's has; a chat goes on to its end."""
_CHARACTERS = 64
"""More characters than this per token have no text that a model reads: it is refused before it is read."""


def generation_routes(plane: BundlePlane, options: ServeOptions) -> list[tuple[str, str, Any]]:
    """Return method, path and endpoint of each route."""

    async def models(request: Request) -> Response:
        """Return the models that generate, and their adapters."""
        found = [_described(name) for name in names_of_texts(plane)]
        return _json({"object": "list", "data": found})

    async def model(request: Request) -> Response:
        """Return one of them."""
        name = request.path_params["model"]
        if name not in names_of_texts(plane):
            raise Refusal(f"there is no model `{name[:100]}` that generates", "not_found")
        return _json(_described(name))

    async def completions(request: Request) -> Response:
        """Go on with texts."""
        return _Reply(plane, options, request, Completion)

    async def chat(request: Request) -> Response:
        """Answer a chat."""
        return _Reply(plane, options, request, Chat)

    return [
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{model}", model),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
    ]


def names_of_texts(plane: BundlePlane) -> list[str]:
    """Return the names that the field `model` of a request may have."""
    models = [*plane.repository.models.values()]
    found = [(m.name, each.servable) for m in models for each in m.served.values()]
    found = [(name, each) for name, each in found if not isinstance(each, Servable)]
    names = [one for name, each in found for one in (name, *(f"{name}:{adapter}" for adapter in each.adapters))]
    return [*dict.fromkeys(names)]


def _described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "aotexport"}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _Reply(Response):
    """The answer to a request, which is read, generated and sent when the response is."""

    background: Any = None

    def __init__(
        self, plane: BundlePlane, options: ServeOptions, request: Request, kind: type[Completion | Chat]
    ) -> None:
        """Read nothing yet."""
        self._plane, self._options, self._request, self._kind = plane, options, request, kind
        self._is_begun = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, until the client goes away."""
        task: Any = asyncio.current_task()
        watching: asyncio.Task[None] | None = None
        headers = self._request.headers
        identity, parent = headers.get("x-request-id", ""), headers.get("traceparent", "")
        asked = Asked(model="", protocol="openai", id=identity, traceparent=parent)
        try:
            async with self._plane.accounted(asked):
                with self._plane.holding() as hold:
                    body = await read_body(self._request, self._options, hold)
                    watching = asyncio.create_task(cancel_when_gone(self._request, task))
                    wanted = read_asked(body, self._kind)
                    await self._answer(asked, wanted, send)
        except asyncio.CancelledError:
            if watching is None or not watching.done():
                raise
            task.uncancel()  # nobody reads an answer
        except Refusal as refusal:
            if not self._is_begun:
                raise
            await self._send(send, b"data: " + msgspec.json.encode(described_error(refusal)) + b"\n\n", more=False)
        finally:
            if watching is not None:
                watching.cancel()

    async def _answer(self, asked: Asked, wanted: Completion | Chat, send: Any) -> None:
        texts = Texts(self._plane, self._options, asked, wanted)
        answering = Answering(model=wanted.model, is_chat=isinstance(wanted, Chat))
        asked.id = asked.id or answering.id
        pieces: list[Written] = []
        async with contextlib.aclosing(texts.pieces()) as written:
            async for piece in written:
                if not wanted.stream:
                    pieces.append(piece)
                    continue
                if not self._is_begun:
                    await self._begin(send, b"text/event-stream", b"".join(answering.first(len(texts.generations))))
                await self._send(send, answering.piece(piece))
        answering.prompt_tokens, answering.tokens = texts.prompt_tokens, texts.tokens
        if wanted.stream:
            await self._send(send, answering.last(wanted.stream_options), more=False)
        else:
            whole = answering.whole(pieces, len(texts.generations))
            await self._begin(send, b"application/json", whole, more=False)

    async def _begin(self, send: Any, media_type: bytes, body: bytes, *, more: bool = True) -> None:
        self._is_begun = True
        headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, body, more=more)

    async def _send(self, send: Any, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


class Texts:
    """The texts that a request asks for, while they are generated.

    Attributes:
        generations: each of them, those of one prompt side by side.
        prompt_tokens: of all prompts; `tokens`: of all texts so far.
    """

    def __init__(self, plane: BundlePlane, options: ServeOptions, asked: Asked, wanted: Completion | Chat) -> None:
        """Ask for nothing yet; what is named `MODEL` or `MODEL:ADAPTER` is noted in `asked`."""
        self._plane, self._asked, self._wanted, self._wait_s = plane, asked, wanted, options.request_timeout_s
        model, colon, adapter = wanted.model.rpartition(":")
        has_adapter = colon and wanted.model not in plane.repository.models
        asked.model, self._adapter = (model, adapter) if has_adapter else (wanted.model, None)
        self._began = asyncio.get_running_loop().time()
        self.generations: list[Generation] = []
        self.prompt_tokens = self.tokens = 0

    async def pieces(self) -> AsyncGenerator[Written]:
        """Yield the pieces of all texts, as they come: a whole answer within the time, or each piece of a stream."""
        asked = self._asked
        try:
            async with self._limit():
                asked.served, generator = await self._plane.submit(asked.model, "", self._submit)
            self._wait_s = min(self._wait_s, asked.served.bundle.request_timeout_s)
            async for piece in self._pieces(generator):
                if self.tokens == 1:
                    metrics.FIRST.labels(asked.model).observe(time.monotonic() - asked.began)
                if piece.text or piece.scored or piece.finish:
                    yield piece
            asked.answer = self._took()
        finally:
            self._end()
            if self.tokens:
                metrics.TOKENS.labels(asked.model).inc(self.tokens)

    @contextlib.asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        """Refuse what takes too long in the block."""
        begin = asyncio.get_running_loop().time() if self._wanted.stream and self.tokens else self._began
        try:
            async with asyncio.timeout_at(begin + self._wait_s):
                yield
        except TimeoutError:
            text = f"the request was not answered within {self._wait_s:g} s, see `--request-timeout-s`"
            raise Refusal(text, "deadline") from None

    async def _submit(self, served: Served) -> Generator:
        """Queue the texts."""
        generator = served.servable
        if isinstance(generator, Servable):
            raise Refusal(f"model `{self._wanted.model[:100]}` generates no text; ask /v2/models for its inputs")
        # In the thread whose standstill is noticed: a bundle's template and patterns may not come to an end.
        reading = Waiting(function=lambda: self._prompts(generator))
        prompts = await asyncio.wrap_future(generator.batcher.submit(reading))
        self._end()  # those of a version that was swapped meanwhile
        self.generations, self._came = [], asyncio.Queue[tuple[int, "Token | Exception"]]()
        self.prompt_tokens = sum(map(len, prompts))
        for prompt in prompts:
            for number in range(self._wanted.n or 1):
                self.generations.append(self._submitted(generator, prompt, number))
        return generator

    def _prompts(self, generator: Generator) -> list[list[int]]:
        """Return the tokens of each prompt."""
        wanted, tokenizer = self._wanted, generator.tokenizer
        texts = [tokenizer.chat(wanted.plain)] if isinstance(wanted, Chat) else wanted.prompts
        for text in texts:
            if isinstance(text, str) and len(text) > _CHARACTERS * generator.longest:
                raise Refusal(f"a prompt has {len(text)} characters; the model reads {generator.longest} tokens")
        special = not isinstance(wanted, Chat)  # a template has them
        return [tokenizer.tokens(text, special=special) if isinstance(text, str) else text for text in texts]

    def _submitted(self, generator: Generator, prompt: list[int], number: int) -> Generation:
        wanted, left = self._wanted, max(generator.most_after(prompt), 1)
        if isinstance(wanted, Chat):
            most, best = wanted.max_completion_tokens or wanted.max_tokens or left, wanted.top_logprobs or 0
            logprobs = best if wanted.logprobs else None
        else:
            most, logprobs = wanted.max_tokens or min(_TOKENS, left), wanted.logprobs
        loop, came, index = asyncio.get_running_loop(), self._came, len(self.generations)

        def put(token: Token | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(came.put_nowait, (index, token))

        return generator.submit(
            prompt,
            put,
            most=most,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            seed=None if wanted.seed is None else wanted.seed + number,
            logprobs=logprobs,
            adapter=self._adapter,
        )

    async def _pieces(self, generator: Generator) -> AsyncIterator[Written]:
        """Yield the pieces of all texts, as they come."""
        texts = [Text(generator.tokenizer, self._wanted.stops) for _ in self.generations]
        going = set(range(len(texts)))
        while going:
            async with self._limit():
                index, token = await self._came.get()
            if isinstance(token, Exception):
                raise token
            if index in going:
                self.tokens += 1
                piece = self._piece(generator.tokenizer, texts[index], index, token)
                if piece.finish:
                    self.generations[index].wanted = False
                    going.discard(index)
                yield piece

    def _piece(self, tokenizer: Tokenizer, text: Text, index: int, token: Token) -> Written:
        piece = Written(index)
        if token.ended != "stop":
            piece.text = text.add(token.id)
        if token.ended and not text.stopped:
            piece.text += text.end()
        if token.ended or text.stopped:
            piece.finish = "stop" if text.stopped else token.ended
        if token.best is not None:
            best = tuple((tokenizer.name(each), logprob) for each, logprob in token.best)
            scored = Scored(tokenizer.name(token.id), token.logprob, best)
            piece.scored = [] if token.ended == "stop" else [scored]
        return piece

    def _took(self) -> Answer:
        """Return how long the texts waited and were generated."""
        took = Answer()
        first = min(self.generations, key=lambda each: each.began)
        took.began, took.waited_s = first.began, first.began - first.since
        took.ran_s = time.monotonic() - first.began
        took.batch_size = max(each.company for each in self.generations)
        return took

    def _end(self) -> None:
        """Want no more."""
        for each in self.generations:
            each.wanted = False
