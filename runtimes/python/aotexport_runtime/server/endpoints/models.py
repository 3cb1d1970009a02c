"""KServe's models, repository and data plane over the models of a repository."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import kserve
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

import aotexport_runtime
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.server.messages import Request, Signature
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.server.repository import Marks, Model, Repository, Served
from aotexport_runtime.server.tensors import Array
from aotexport_runtime.serving.batcher import Answer


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a model answered: an array by name, its version, and how long the call waited and ran."""

    outputs: dict[str, Array]
    version: str
    answer: Answer


class BundleModel(kserve.Model):
    """A model of the repository, in whichever version it is served now."""

    def __init__(self, model: Model, repository: Repository, most_s: float) -> None:
        super().__init__(model.name)
        self._model = model
        self._repository = repository
        self._most_s = most_s

    async def healthy(self) -> bool:
        """Return whether calls are answered, if only after the model is loaded."""
        return self._model.state == "READY"

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return name, datatype and shape of each input."""
        return _described(self.signature.inputs)

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return name, datatype and shape of each output."""
        return _described(self.signature.outputs)

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of the version that is, or was last, served; `Refusal`: none was."""
        if self._model.signature is None:
            self._repository.current(self.name)
            raise Refusal(f"model `{self.name}` is being loaded", "unavailable")
        return self._model.signature

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Answered:
        """Return the outputs of a call.

        Raises:
            Refusal: the payload is no request of this protocol.
            AotExportError: see `Servable.submit`.
        """
        if not isinstance(payload, Request):
            raise Refusal(f"model `{self.name}` speaks version 2 of the protocol: /v2/models/{self.name}/infer")
        wait_s = min(payload.timeout_s or self._most_s, self._most_s)
        served, answer = self._submit(payload, wait_s)
        return Answered(outputs=await asyncio.wrap_future(answer), version=served.version, answer=answer)

    def _submit(self, request: Request, wait_s: float) -> tuple[Served, Answer]:
        while True:
            served = self._repository.current(self.name)
            if served is None:
                raise Refusal(f"model `{self.name}` was let go; ask again", "unavailable")
            try:
                return served, served.servable.submit(request.inputs, timeout_s=wait_s, adapter=request.adapter)
            except NotSupported:
                # The version was swapped between these two lines, and is closed.
                if self._model.served is served:
                    raise


def _described(tensors: Any) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": list(shape)} for name, (datatype, shape) in tensors.items()]


class BundleRepository(kserve.ModelRepository):
    """The repository, as KServe asks for it."""

    def __init__(self, repository: Repository, most_s: float) -> None:
        super().__init__()
        self._repository = repository
        self._most_s = most_s

    def get_models(self) -> dict[str, BundleModel]:
        """Return every model by name, also those that cannot be served."""
        return {name: self._wrapped(model) for name, model in [*self._repository.models.items()]}

    def get_model(self, name: str) -> BundleModel | None:
        """Return the model called `name`, or None."""
        model = self._repository.models.get(name)
        return None if model is None else self._wrapped(model)

    def _wrapped(self, model: Model) -> BundleModel:
        known = self.models.get(model.name)
        if known is None or known._model is not model:
            known = self.models[model.name] = BundleModel(model, self._repository, self._most_s)
        return known


class BundlePlane(DataPlane):
    """KServe's data plane: versions, exact metadata, and readiness that means something."""

    def __init__(self, repository: Repository, most_s: float) -> None:
        super().__init__(BundleRepository(repository, most_s))
        self.repository = repository
        self._server_name = "aotexport"
        self._server_version = aotexport_runtime.__version__

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return super().metadata() | {"extensions": ["model_repository", "binary_tensor_data"]}

    async def ready(self) -> bool:
        """Return whether every model has passed its self-test, and no queue is full."""
        models = [*self.repository.models.values()]
        return self.repository.is_proved and not any(m.served and m.served.servable.batcher.is_full for m in models)

    async def get_model(self, name: str) -> BundleModel:
        """Return a model that is loaded, loading it if it has to be; errors: see `loaded`."""
        await self.loaded(name)
        return self.get_model_from_registry(name)

    async def loaded(self, name: str, version: str = "") -> Served:
        """Return what answers calls of a model, loading it if it has to be.

        Raises:
            Refusal: there is no such model or version, or it cannot be served.
        """
        while (served := self.repository.current(name, version)) is None:
            await asyncio.to_thread(self.repository.demand, name)
        return served

    async def model_metadata(self, model_name: str, version: str = "") -> dict[str, Any]:
        if self.repository.model(model_name).signature is None:
            await self.loaded(model_name, version)
        served = self.repository.current(model_name, version)
        found = await super().model_metadata(model_name)
        chosen = self.repository.model(model_name).chosen
        current = served.version if served else chosen.version if chosen else ""
        return found | {"platform": "aotexport", "versions": [current]}

    async def model_ready(self, model_name: str, disable_predictor_health_check: bool = False) -> bool:
        return self.repository.model(model_name).state == "READY"


class BundleExtension(ModelRepositoryExtension):
    """Index, load and unload, for every worker."""

    def __init__(self, plane: BundlePlane, marks: Marks) -> None:
        super().__init__(plane.model_registry)
        self._repository = plane.repository
        self._marks = marks

    async def index(self, filter_ready: bool | None = False) -> list[dict[str, str]]:
        """Return name, version, state and reason of every model."""
        models = [*self._repository.models.values()]
        return [
            {
                "name": model.name,
                "version": model.chosen.version if model.chosen else model.candidates[0].version,
                "state": model.state,
                "reason": model.reason,
            }
            for model in models
            if not filter_ready or model.state == "READY"
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
