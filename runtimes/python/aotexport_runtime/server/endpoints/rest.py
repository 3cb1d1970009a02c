"""HTTP: the routes, behind KServe's server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from kserve.protocol.rest.server import RESTServer
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.connections import Connection, Door, Endpoint, cancel_when_gone, read_body
from aotexport_runtime.server.endpoints.generation import generation_routes
from aotexport_runtime.server.endpoints.plane import BundlePlane, Hold, coded, tensors_of
from aotexport_runtime.server.messages import Request as InferRequest
from aotexport_runtime.server.messages import Signature, read_request, write_answer, write_call
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import CODES, Refusal
from aotexport_runtime.server.repository import Served
from aotexport_runtime.serving.batcher import Answer

JSON_NBYTES = "inference-header-content-length"
"""The header that tells how much of a body is JSON."""

_QUICK_S = 0.01
"""Nobody looks whether the client of a request that is answered earlier has gone away."""
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

    def __init__(self, plane: BundlePlane, options: ServeOptions, *, is_admin: bool = False) -> None:
        """Serve nothing yet; `is_admin`: at a port of their own, models are loaded and unloaded, and little else."""
        super().__init__(
            "",  # see `serve`
            plane,
            plane,
            options.http_port,
            grace_period=1,  # after `BundlePlane.drain`
            ssl_certfile=options.tls_cert and str(options.tls_cert),
            ssl_keyfile=options.tls_key and str(options.tls_key),
        )
        self.config.host = options.host
        self.config.access_log = False
        self.config.ws, self.config.lifespan = "none", "off"
        self.config.proxy_headers = False
        self.config.http = functools.partial(Connection, head_s=options.request_timeout_s)
        self.config.limit_concurrency = options.max_connections
        self._server.capture_signals = contextlib.nullcontext  # they are the worker's
        self._plane = plane
        self._options = options
        self._is_admin = is_admin
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _PAGE.iterdir() if path.suffix in _TYPES
        }

    async def serve(self, listening: socket.socket) -> None:
        """Answer requests until `stop`."""
        routes = [Route(path, Endpoint(answer), methods=[method]) for method, path, answer in self._routes()]
        self.config.app = Door(Router(routes), self._options)
        await self._server.serve(sockets=[listening])

    def stop(self) -> None:
        """Let `serve` close the port and return."""
        self._server.should_exit = True

    def _routes(self) -> list[tuple[str, str, Any]]:
        """Return method, path and endpoint of each route; at a port of administration, without those of clients."""
        model, version = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{version}"
        plane = self._plane
        of_models = {"/stats": plane.statistics, "/config": plane.model_config, "": plane.model_metadata}
        common = [
            ("GET", "/metrics", self.metrics),
            ("POST", "/v2/repository/index", self.index),
            *(("POST", f"/v2/repository/models/{{model}}/{change}", self.change) for change in ("load", "unload")),
            ("GET", "/v2/health/live", told(lambda: {"live": True})),
            ("GET", "/v2/health/ready", self.ready),
        ]
        routes = [
            ("POST", f"{model}/infer", self.infer),
            ("POST", f"{version}/infer", self.infer),
            ("GET", f"{model}/ready", self.model_ready),
            ("GET", f"{version}/ready", self.model_ready),
            ("GET", "/v2/models/stats", told(plane.statistics)),
            *(("GET", place + end, told(tell)) for end, tell in of_models.items() for place in (model, version)),
            ("GET", "/v2/models", told(plane.models)),
            ("GET", "/v2", told(plane.metadata)),
            ("GET", "/", told(lambda: {"live": True})),
            *generation_routes(self._plane, self._options),
        ]
        pages = [
            ("GET", "/ui", self.file),
            ("GET", "/ui/models/{model}/recorded", self.recorded),
            ("GET", "/ui/models/{model}/about", self.about),
            ("GET", "/ui/{name}", self.file),
        ]
        return common if self._is_admin else [*routes, *common, *(pages if self._options.ui else ())]

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of every worker."""
        body, content_type = metrics.write_metrics(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def index(self, request: Request) -> Response:
        """Return every model with its state; with `{"ready": true}`, those that are ready."""
        with self._plane.holding() as hold:
            body = bytes(await read_body(request, self._options, hold))
        try:
            asked = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(f"the body is no request for the index: {error}") from None
        return _json(await self._plane.index(asked.get("ready") is True))

    async def change(self, request: Request) -> Response:
        """Load the versions of a model, or let it go."""
        self._plane.check_admin(request.headers.get("authorization", ""), is_own_port=self._is_admin)
        change = self._plane.load if request.url.path.endswith("/load") else self._plane.unload
        return _json(await change(request.path_params["model"]))

    async def ready(self, request: Request) -> Response:
        """Return whether what was promised is served; the refusal says why not."""
        if reason := self._plane.unready:
            raise Refusal(reason, "unavailable")
        return _json({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        """Return whether a model, or a version of it, is served; the refusal says why not."""
        name, version = request.path_params["model_name"], request.path_params.get("version", "")
        self._plane.repository.current(name, version)
        if not await self._plane.model_ready(name):
            raise Refusal(f"model `{name}` is being loaded", "unavailable")
        return _json({"name": name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """Answer an inference request."""
        path = request.path_params
        model, version = path["model_name"], path.get("version", "")
        task: Any = asyncio.current_task()
        watching: asyncio.Task[None] | None = None
        later: asyncio.TimerHandle | None = None

        def watch() -> None:
            nonlocal watching
            watching = asyncio.create_task(cancel_when_gone(request, task))

        async def read(signature: Signature, hold: Hold) -> InferRequest:
            nonlocal later
            body = await read_body(request, self._options, hold)
            later = asyncio.get_running_loop().call_later(_QUICK_S, watch)
            named = request.headers.get("x-request-id", "")
            return await coded(len(body), read_request, body, _json_nbytes(request), signature, named)

        def write(asked: InferRequest, served: Served, took: Answer) -> Response:
            body, json_nbytes = write_answer(asked, model, served.version, took.result(), served.signature)
            headers = {"server-timing": f"queue;dur={took.waited_s * 1e3:.3f}, compute;dur={took.ran_s * 1e3:.3f}"}
            if json_nbytes is None:
                return Response(body, media_type="application/json", headers=headers)
            headers[JSON_NBYTES] = str(json_nbytes)
            return Response(body, media_type="application/octet-stream", headers=headers)

        try:
            return await self._plane.answer("http", model, version, read, write, request.headers.get("traceparent", ""))
        except asyncio.CancelledError:
            if watching is None or not watching.done():
                raise
            task.uncancel()
            return Response(status_code=CODES["cancelled"][0])  # nobody reads it
        finally:
            for each in (later, watching):
                if each is not None:
                    each.cancel()

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

    async def about(self, request: Request) -> Response:
        """Return along which size requests of a model are joined, or why they are not, and the names of its classes."""
        model = request.path_params["model"]
        servable = tensors_of(await self._plane.loaded(model), model)
        return _json({"axes": servable.batch_axes, "not_joined": servable.not_joined, "classes": servable.classes})


def told(tell: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that answers with what a function tells of what a path names."""

    async def answer(request: Request) -> Response:
        found = tell(**request.path_params)
        return _json(await found if inspect.isawaitable(found) else found)

    return answer


def _json_nbytes(request: Request) -> int | None:
    header = request.headers.get(JSON_NBYTES)
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 19):
        raise Refusal(f"the header `Inference-Header-Content-Length` is no length: {header[:50]!r}")
    return int(header)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
