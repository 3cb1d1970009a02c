"""HTTP: KServe's server and routes, with routes of ours before them where KServe has none, or other answers."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import kserve.errors
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from kserve.protocol.rest.server import RESTServer
from starlette.exceptions import HTTPException

from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.plane import BundleExtension, BundlePlane, refusal_of_kserve
from aotexport_runtime.server.messages import Request as InferRequest
from aotexport_runtime.server.messages import Signature, read_request, write_answer, write_call
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import CODES, Refusal

JSON_NBYTES = "inference-header-content-length"
"""The header that tells how much of a body is JSON."""

_PAGE = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE_HEADERS = {
    # Nothing but the server's own files runs in the page, whatever a bundle calls its inputs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class RestServer(RESTServer):
    """KServe's HTTP server, at a socket that other workers listen at as well, with our routes."""

    def __init__(self, plane: BundlePlane, extension: BundleExtension, options: ServeOptions) -> None:
        super().__init__(
            "kserve.model_server:app",
            plane,
            extension,
            options.http_port,
            grace_period=int(options.drain_s) or 1,
            ssl_certfile=options.tls_cert and str(options.tls_cert),
            ssl_keyfile=options.tls_key and str(options.tls_key),
        )
        self.config.host = options.host
        self.config.access_log = False
        self.config.ws = "none"
        self._plane = plane
        self._extension = extension
        self._options = options
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _PAGE.iterdir() if path.suffix in _TYPES
        }

    async def serve(self, listening: socket.socket) -> None:
        """Answer requests until the process is told to end, and the last one is answered."""
        self.create_application()
        await self._server.serve(sockets=[listening])

    def _register_endpoints(self, app: FastAPI) -> None:
        """Add inference, versions, index, metrics, and the page `/ui`, which tries models in a browser."""
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        routes = [
            ("GET", "/metrics", self.metrics),
            ("POST", "/v2/repository/index", self.index),
            *(("POST", f"/v2/repository/models/{{model}}/{change}", self.change) for change in ("load", "unload")),
            ("POST", f"{model}/infer", self.infer),
            ("POST", f"{version}/infer", self.infer),
            ("GET", f"{version}/ready", self.version_ready),
            ("GET", model, self.version_metadata),
            ("GET", version, self.version_metadata),
        ]
        pages = [
            ("GET", "/ui", self.file),
            ("GET", "/ui/models/{model}/recorded", self.recorded),
            ("GET", "/ui/models/{model}/joining", self.joining),
            ("GET", "/ui/{name}", self.file),
        ]
        for method, path, answer in [*routes, *(pages if self._options.ui else ())]:
            app.add_route(path, answer, methods=[method], include_in_schema=False)
        super()._register_endpoints(app)

    def _add_middlewares(self, app: FastAPI) -> None:
        """Add none: times are in our metrics."""

    def _add_exception_handlers(self, app: FastAPI) -> None:
        errors = [getattr(kserve.errors, name) for name in ("ModelNotFound", "ModelNotReady", "InvalidInput")]
        for error in (*errors, kserve.errors.ServerNotReady, Refusal, NotImplementedError):
            app.add_exception_handler(error, _refuse)
        app.add_exception_handler(RequestValidationError, _refuse_body)
        app.add_exception_handler(HTTPException, _refuse_route)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of every worker."""
        body, content_type = metrics.write_metrics(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def index(self, request: Request) -> Response:
        """Return every model with its state; with `{"ready": true}`, those that are ready."""
        body = bytes(await read_body(request, self._options))
        try:
            asked = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(f"the body is no request for the index: {error}") from None
        return _json(await self._extension.index(asked.get("ready") is True))

    async def change(self, request: Request) -> Response:
        """Load the newest version of a model, or let it go."""
        # A browser names the page that sends; clients that are no browsers name none.
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise Refusal(f"pages of {origin[:100]} may not load and unload models", "forbidden")
        change = self._extension.load if request.url.path.endswith("/load") else self._extension.unload
        return _json(await change(request.path_params["model"]))

    async def version_metadata(self, request: Request) -> Response:
        """Return the inputs and outputs of a model."""
        path = request.path_params
        return _json(await self._plane.model_metadata(path["model"], path.get("version", "")))

    async def version_ready(self, request: Request) -> Response:
        """Return whether a version of a model is served."""
        path = request.path_params
        self._plane.repository.current(path["model"], path["version"])
        return _json({"name": path["model"], "ready": True})

    async def infer(self, request: Request) -> Response:
        """Answer an inference request."""
        path = request.path_params
        model, version = path["model"], path.get("version", "")

        async def read(signature: Signature) -> InferRequest:
            body = await read_body(request, self._options)
            return read_request(body, _json_nbytes(request), signature, request.headers.get("x-request-id", ""))

        def write(asked: InferRequest, answered: Any, signature: Signature) -> Response:
            body, json_nbytes = write_answer(asked, model, answered.version, answered.outputs, signature)
            took = answered.answer
            headers = {"server-timing": f"queue;dur={took.waited_s * 1e3:.3f}, compute;dur={took.ran_s * 1e3:.3f}"}
            if json_nbytes is None:
                return Response(body, media_type="application/json", headers=headers)
            headers[JSON_NBYTES] = str(json_nbytes)
            return Response(body, media_type="application/octet-stream", headers=headers)

        return await self._plane.answer("http", model, version, read, write)

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise Refusal(f"no route GET {request.url.path[:200]}", "not_found")
        return Response(found[0], media_type=found[1], headers=_PAGE_HEADERS)

    async def recorded(self, request: Request) -> Response:
        """Return the inputs of a recorded call of a model, as a request for it in bytes."""
        model = request.path_params["model"]
        served = await self._plane.loaded(model)
        inputs = await asyncio.to_thread(served.servable.recorded_call)
        if inputs is None:
            raise Refusal(f"the bundle of model `{model}` holds no recorded call", "not_found")
        body, json_nbytes = write_call(inputs, served.signature)
        return Response(body, media_type="application/octet-stream", headers={JSON_NBYTES: str(json_nbytes)})

    async def joining(self, request: Request) -> Response:
        """Return the name of the size along which requests of a model are joined, or why they are not."""
        servable = (await self._plane.loaded(request.path_params["model"])).servable
        axes = servable.batch_axes
        return _json({"along": axes and axes.name, "not_joined": servable.not_joined})


def _json_nbytes(request: Request) -> int | None:
    header = request.headers.get(JSON_NBYTES)
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 19):
        raise Refusal(f"the header `Inference-Header-Content-Length` is no length: {header[:50]!r}")
    return int(header)


async def read_body(request: Request, options: ServeOptions) -> bytearray:
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
                    body += chunk
                elif size > 2 * most:
                    break
    except TimeoutError:
        raise Refusal(
            f"the request took longer than {options.request_timeout_s:g} s to come, see `--request-timeout-s`",
            "too_slow",
        ) from None
    # As much again is read and dropped: a client that still sends would not see the answer.
    if size > most:
        raise too_large
    return body


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = refusal_of_kserve(error)
    # What is left of such a request is not read: its connection is of no further use.
    headers = {"connection": "close"} if refusal.kind in ("too_slow", "too_large") else None
    body = msgspec.json.encode({"error": str(refusal)})
    return Response(body, status_code=CODES[refusal.kind][0], media_type="application/json", headers=headers)


async def _refuse_body(request: Request, error: Exception) -> Response:
    found: Any = error
    first = found.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return await _refuse(request, Refusal(f"the request does not fit: {where}: {first['msg']}"))


async def _refuse_route(request: Request, error: Exception) -> Response:
    found: Any = error
    text = f"no route {request.method} {request.url.path[:200]}" if found.status_code == 404 else str(found.detail)
    return Response(msgspec.json.encode({"error": text}), status_code=found.status_code, media_type="application/json")
