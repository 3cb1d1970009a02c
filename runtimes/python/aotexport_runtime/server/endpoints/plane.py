"""The models of a repository as KServe asks for them, and requests of either protocol, counted and logged."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import kserve
import kserve.errors
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

import aotexport_runtime
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.messages import Request, Signature
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import Refusal, refusal_of
from aotexport_runtime.server.repository import Marks, Repository, Served
from aotexport_runtime.server.tensors import Array
from aotexport_runtime.serving.batcher import Answer

log = logging.getLogger("aotexport_runtime.server.access")

Reply = TypeVar("Reply")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a model answered: an array by name, its version, and how long the call waited and ran."""

    outputs: dict[str, Array]
    version: str
    answer: Answer


class BundlePlane(DataPlane):
    """KServe's data plane: versions, exact metadata, readiness that means something, and inference."""

    def __init__(self, repository: Repository, options: ServeOptions) -> None:
        registry = kserve.ModelRepository()
        registry.models = repository.models
        super().__init__(registry)
        self.repository = repository
        self._options = options
        self._server_name = "aotexport"
        self._server_version = aotexport_runtime.__version__

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return super().metadata() | {"extensions": ["model_repository", "binary_tensor_data"]}

    async def ready(self) -> bool:
        """Return whether every model has passed its self-test, and no queue is full."""
        models = [*self.repository.models.values()]
        return self.repository.is_proved and not any(m.served and m.served.servable.batcher.is_full for m in models)

    async def get_model(self, name: str) -> Any:
        """Refuse version 1 of the protocol, of which alone KServe itself asks models."""
        self.repository.current(name)
        raise Refusal(f"model `{name}` speaks version 2 of the protocol: /v2/models/{name}/infer")

    async def loaded(self, name: str, version: str = "") -> Served:
        """Return what answers calls of a model, loading it if it has to be.

        Raises:
            Refusal: there is no such model or version, or it cannot be served.
        """
        while (served := self.repository.current(name, version)) is None:
            await asyncio.to_thread(self.repository.demand, name)
        return served

    async def model_metadata(self, model_name: str, version: str = "") -> dict[str, Any]:
        model = self.repository.model(model_name)
        if model.signature is None:
            await self.loaded(model_name, version)
        served, signature = self.repository.current(model_name, version), model.signature
        if signature is None:
            raise Refusal(f"model `{model_name}` is being loaded", "unavailable")
        version = served.version if served else model.chosen.version if model.chosen else ""
        described = {"inputs": _described(signature.inputs), "outputs": _described(signature.outputs)}
        return {"name": model_name, "platform": "aotexport", "versions": [version], **described}

    async def model_ready(self, model_name: str, disable_predictor_health_check: bool = False) -> bool:
        return self.repository.model(model_name).state == "READY"

    async def answer(
        self,
        protocol: str,
        model: str,
        version: str,
        read: Callable[[Signature], Awaitable[Request]],
        write: Callable[[Request, Answered, Signature], Reply],
    ) -> Reply:
        """Return the reply to a request, which `read` reads by the signature of the model, and `write` writes.

        Raises:
            Refusal: the request is not answered; says why.
        """
        began = time.monotonic()
        request: Request | None = None
        answered: Any = None
        outcome, text = "cancelled", ""
        try:
            signature = (await self.loaded(model, version)).signature
            request = await read(signature)
            # Not by `DataPlane.infer`: it measures each request once more, for a tenth of a millisecond.
            served, answer = await self._submit(model, version, request)
            outputs = await asyncio.wrap_future(answer)
            answered = Answered(outputs=outputs, version=served.version, answer=answer)
            reply = write(request, answered, signature)
            outcome = "ok"
            return reply
        except asyncio.CancelledError:
            raise
        except Exception as error:
            refusal = refusal_of(error)
            outcome, text = refusal.kind, str(refusal)
            raise refusal from error
        finally:
            fields = {"id": request.id if request else "", "model": model[:100], "protocol": protocol}
            fields |= {"outcome": outcome, "version": answered.version if answered else ""}
            # When the reply has been sent.
            note = functools.partial(self._note, model, fields, answered, text, time.monotonic() - began)
            asyncio.get_running_loop().call_soon(note)

    async def _submit(self, name: str, version: str, request: Request) -> tuple[Served, Answer]:
        most_s = self._options.request_timeout_s
        wait_s = min(request.timeout_s or most_s, most_s)
        while True:
            served = await self.loaded(name, version)
            try:
                return served, served.servable.submit(request.inputs, timeout_s=wait_s, adapter=request.adapter)
            except NotSupported:
                # The version was swapped between these two lines, and is closed.
                if self.repository.model(name).served is served:
                    raise

    def _note(self, model: str, fields: dict[str, Any], answered: Answered | None, text: str, seconds: float) -> None:
        # Names that a client invents are no labels.
        label = "" if fields["outcome"] == "not_found" else model
        metrics.REQUESTS.labels(label, fields["version"], fields["protocol"], fields["outcome"]).inc()
        fields["ms"] = round(seconds * 1e3, 3)
        if answered is not None:
            answer = answered.answer
            metrics.SECONDS.labels(model).observe(seconds)
            metrics.QUEUE.labels(model).observe(answer.waited_s)
            metrics.COMPUTE.labels(model).observe(answer.ran_s)
            metrics.BATCH.labels(model).observe(answer.batch_size)
            fields |= {"queue_ms": round(answer.waited_s * 1e3, 3), "compute_ms": round(answer.ran_s * 1e3, 3)}
            fields["batch"] = answer.batch_size
        if text:
            fields["error"] = text[:500]
        if self._options.access_log == "on":
            log.info("request", extra={"fields": fields})


def _described(tensors: Any) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": list(shape)} for name, (datatype, shape) in tensors.items()]


class BundleExtension(ModelRepositoryExtension):
    """Index, load and unload, for every worker."""

    def __init__(self, plane: BundlePlane, marks: Marks) -> None:
        super().__init__(plane.model_registry)
        self._repository = plane.repository
        self._marks = marks

    async def index(self, filter_ready: bool | None = False) -> list[dict[str, str]]:
        """Return name, version, state and reason of every model."""
        return [
            {"name": m.name, "version": (m.chosen or m.candidates[0]).version, "state": m.state, "reason": m.reason}
            for m in [*self._repository.models.values()]
            if not filter_ready or m.state == "READY"
        ]

    async def load(self, model_name: str) -> dict[str, Any]:
        """Load the newest version of a model; `Refusal`: there is none, or it fails."""
        await asyncio.to_thread(self._repository.load, model_name)
        self._marks.set(model_name, unloaded=False)
        return {"name": model_name, "load": True}

    async def unload(self, model_name: str) -> dict[str, Any]:
        """Let a model go when it has answered what it was asked; `Refusal`: there is none."""
        await asyncio.to_thread(self._repository.unload, model_name)
        self._marks.set(model_name, unloaded=True)
        return {"name": model_name, "unload": True}


def refusal_of_kserve(error: Exception) -> Refusal:
    """Return what a client is told of an error of KServe's routes."""
    if isinstance(error, kserve.errors.ModelNotFound):
        return Refusal(str(error), "not_found")
    if isinstance(error, kserve.errors.ModelNotReady | kserve.errors.ServerNotReady | kserve.errors.ServerNotLive):
        return Refusal(str(error), "unavailable")
    return Refusal(str(error)) if isinstance(error, kserve.errors.InvalidInput) else refusal_of(error)
