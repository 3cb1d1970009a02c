"""The page `/ui`, which tries models in a browser: files as they are, and the recorded calls that fill its form."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from aotexport_runtime.server.endpoints.models import BundlePlane
from aotexport_runtime.server.messages import write_call
from aotexport_runtime.server.refusals import Refusal

_DIRECTORY = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Nothing but the server's own files runs in the page, whatever a bundle calls its inputs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class Page:
    """The routes of the page."""

    def __init__(self, plane: BundlePlane, json_nbytes: str) -> None:
        """Read the files; `json_nbytes` is the header that tells how much of a body is JSON."""
        self._plane = plane
        self._json_nbytes = json_nbytes
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix])
            for path in _DIRECTORY.iterdir()
            if path.suffix in _TYPES
        }

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(include_in_schema=False)
        add: Callable[..., Any] = router.add_route
        add("/ui", self.file, methods=["GET"])
        add("/ui/models/{model}/recorded", self.recorded, methods=["GET"])
        add("/ui/models/{model}/joining", self.joining, methods=["GET"])
        add("/ui/{name}", self.file, methods=["GET"])
        return router

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise Refusal("not_found", f"no route GET {request.url.path[:200]}")
        return Response(found[0], media_type=found[1], headers=_HEADERS)

    async def recorded(self, request: Request) -> Response:
        """Return the inputs of a recorded call of a model, as a request for it in bytes."""
        model = request.path_params["model"]
        served = await self._plane.loaded(model)
        inputs = await asyncio.to_thread(served.servable.recorded_call)
        if inputs is None:
            raise Refusal("not_found", f"the bundle of model `{model}` holds no recorded call")
        body, json_nbytes = write_call(inputs, served.signature)
        headers = {self._json_nbytes: str(json_nbytes)}
        return Response(body, media_type="application/octet-stream", headers=headers)

    async def joining(self, request: Request) -> Response:
        """Return the name of the size along which requests of a model are joined, or why they are not."""
        servable = (await self._plane.loaded(request.path_params["model"])).servable
        axes = servable.batch_axes
        return JSONResponse({"along": axes and axes.name, "not_joined": servable.not_joined})
