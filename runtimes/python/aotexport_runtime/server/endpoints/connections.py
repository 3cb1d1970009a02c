"""What a connection may send before it is heard: a head of some size and time, for a host that the server is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aotexport_runtime.server.endpoints.plane import Hold
from aotexport_runtime.server.openai import described_error
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import CODES, Refusal, refusal_of

_OWN = re.compile(r"(localhost|[\d.]+|\[[\da-f:.]+\])?(:\d+)?", re.IGNORECASE)
_HEAD_NBYTES = 1 << 16
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which ends where the head of a request is too large, or does not come to an end."""

    def __init__(self, *, head_s: float, **more: Any) -> None:
        """Take `head_s` for the longest time from the first byte of a head, or the connection, to its end."""
        super().__init__(**more)
        self._head_s = head_s
        self._head_nbytes = 0
        self._ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.on_message_begin()

    def on_message_begin(self) -> None:
        """Begin with the head of a request."""
        super().on_message_begin()
        if self._ending is None:
            self._head_nbytes, self._ending = 0, self.loop.call_later(self._head_s, self.transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head_nbytes += len(data)
        if self._ending is not None and self._head_nbytes > _HEAD_NBYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Go on with the body."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        super().on_headers_complete()


class Door:
    """Refuses what pages of other sites send, also those that a name server sends here under a name of their own.

    The server's own are addresses, `localhost`, and `--allow-host`; beyond its machine any name, if none is allowed.
    """

    def __init__(self, app: Any, options: ServeOptions) -> None:
        """Stand before `app`."""
        self._app = app
        self._allowed = options.allow_host
        self._is_strict = bool(options.allow_host) or options.host in ("localhost", "127.0.0.1", "::1")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        headers = Headers(raw=scope.get("headers", []))
        host, app = headers.get("host", ""), self._app
        # A browser names the page that sends; clients that are no browsers name none.
        page = headers.get("origin", host).rpartition("://")[2]
        if self._is_strict and not _OWN.fullmatch(host) and _name(host) not in self._allowed:
            app = refused(Refusal(f"this server is not `{_name(host)[:100]}`, see `--allow-host`", "forbidden"))
        elif page != host and _name(page) not in self._allowed:
            app = refused(Refusal(f"pages of {headers['origin'][:100]} may not ask this server", "forbidden"))
        scope["app"] = self  # so that routes raise what they refuse
        try:
            await app(scope, receive, send)
        except HTTPException as error:
            path = f"{scope['method']} {scope['path'][:200]}"
            text = f"no route {path}" if error.status_code == 404 else error.detail
            body = msgspec.json.encode({"error": text})
            headers = {**(error.headers or {}), "content-type": "application/json"}
            await Response(body, status_code=error.status_code, headers=headers)(scope, receive, send)


class Endpoint:
    """A function that answers requests, as an application; its errors are answers too."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        try:
            response = await self._answer(Request(scope, receive, send))
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - answered to the client
            await refused(refusal_of(error), scope["path"])(scope, receive, send)


def _name(host: str) -> str:
    return host.partition(":")[0].lower()


def refused(refusal: Refusal, path: str = "") -> Response:
    """Return the response to a request that is not answered: below `/v1`, as OpenAI's clients read it."""
    headers: dict[str, str] = {}
    if refusal.kind in ("too_slow", "too_large"):
        # What is left of such a request is not read: its connection is of no further use.
        headers["connection"] = "close"
    if refusal.kind in ("overloaded", "unavailable"):
        headers["retry-after"] = "1"
    if refusal.kind == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(described_error(refusal) if path.startswith("/v1/") else {"error": str(refusal)})
    return Response(body, status_code=CODES[refusal.kind][0], media_type="application/json", headers=headers)


async def read_body(request: Request, options: ServeOptions, hold: Hold) -> bytearray:
    """Return the body of a request; `Refusal`: it is larger, or takes longer, than the options allow."""
    most = options.max_request_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Refusal(f"the body is encoded as `{encoding[:50]}`; send it as it is")
    too_large = Refusal(f"the request is larger than {most} bytes, see `--max-request-bytes`", "too_large")
    if int(request.headers.get("content-length", 0)) > 2 * most:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(options.request_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    hold(len(chunk))
                    body += chunk
                elif size > 2 * most:
                    break
    except ClientDisconnect:
        raise Refusal("the client went away before its request was whole", "cancelled") from None
    except TimeoutError:
        raise Refusal(
            f"the request took longer than {options.request_timeout_s:g} s to come, see `--request-timeout-s`",
            "too_slow",
        ) from None
    # As much again is read and dropped: a client that still sends would not see the answer.
    if size > most:
        raise too_large
    return body


async def cancel_when_gone(request: Request, task: asyncio.Task[Any]) -> None:
    """Cancel the task of a request, whose body is read, when its client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()
