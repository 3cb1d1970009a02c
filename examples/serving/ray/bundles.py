"""Serves a directory of bundles by Ray Serve, with replicas that come and go with the load.

    serve run bundles:app repository=/srv/bundles         # this machine
    serve deploy config.yaml                              # a cluster, see README.md

A request is one of the Open Inference Protocol, as JSON: `POST /v2/models/NAME/infer`. A replica loads the models that
it is asked for. A model answers once its recorded calls gave what eager gave. Replicas join waiting calls by the
batcher of `Servable`, which knows along which axis the calls of a bundle may be joined.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from ray import serve

from aotexport_runtime import AotExportError, CallInvalid, Servable
from aotexport_runtime.errors import DeadlinePassed, Overloaded

DTYPES = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}
DTYPES |= {f"{kind}{bits}": f"{kind.lower()}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
STATUS = {CallInvalid: 400, Overloaded: 429, DeadlinePassed: 504}

http = FastAPI()


@serve.deployment(max_ongoing_requests=256)
class Bundles:
    """A replica: the bundles that it was asked for last, of one repository."""

    def __init__(self, repository: str, *, max_batch_size: int = 32, timeout_s: float = 30.0) -> None:
        self._repository = Path(repository)
        self._max_batch_size = max_batch_size
        self._timeout_s = timeout_s

    @serve.multiplexed(max_num_models_per_replica=8)
    async def servable(self, name: str) -> Servable:
        """Return the proven bundle of a name."""
        servable = Servable(self._repository / name, max_batch_size=self._max_batch_size)
        await asyncio.to_thread(servable.warm_up)
        return servable

    async def infer(self, name: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the answer to a request."""
        try:
            servable = await self.servable(name)
            inputs = {each["name"]: array(each) for each in request["inputs"]}
            outputs = await asyncio.wrap_future(servable.submit(inputs, timeout_s=self._timeout_s))
        except AotExportError as error:
            return STATUS.get(type(error), 500), {"error": str(error)}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return 400, {"error": f"the request is none of the Open Inference Protocol: {error!r}"}
        answer = {"model_name": name, "outputs": [tensor(output, value) for output, value in outputs.items()]}
        return 200, answer | ({"id": request["id"]} if "id" in request else {})


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(http)
class Protocol:
    """The HTTP side: sends a request to a replica that has its model already, if there is one."""

    def __init__(self, repository: str, bundles: serve.handle.DeploymentHandle) -> None:
        self._repository = Path(repository)
        self._bundles = bundles

    @http.get("/v2/health/ready")
    async def ready(self) -> dict[str, bool]:
        """Answer once replicas take requests."""
        return {"ready": True}

    @http.post("/v2/models/{name}/infer")
    async def infer(self, name: str, request: dict[str, Any]) -> JSONResponse:
        """Answer a request for a model of the repository."""
        if name not in {each.name for each in self._repository.iterdir()}:
            return JSONResponse({"error": f"there is no model `{name}`"}, status_code=404)
        handle = self._bundles.options(multiplexed_model_id=name)
        status, body = await handle.infer.remote(name, request)
        return JSONResponse(body, status_code=status)


def array(tensor: dict[str, Any]) -> np.ndarray:
    """Return the array of a tensor of a request."""
    return np.asarray(tensor["data"], DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


def tensor(name: str, value: np.ndarray) -> dict[str, Any]:
    """Return an array as a tensor of an answer."""
    return {
        "name": name,
        "datatype": DATATYPES[str(value.dtype)],
        "shape": list(value.shape),
        "data": value.ravel().tolist(),
    }


def app(options: dict[str, Any]) -> serve.Application:
    """Return the application that `serve run bundles:app repository=PATH` starts.

    Args:
        options: `repository`, the directory of the bundles, at the same path on every node; `max_batch_size`, 32;
            `min_replicas`, 1; `max_replicas`, 4; `cpus` of a replica, 1.
    """
    replicas = Bundles.options(
        ray_actor_options={"num_cpus": float(options.get("cpus", 1))},
        autoscaling_config={
            "min_replicas": int(options.get("min_replicas", 1)),
            "max_replicas": int(options.get("max_replicas", 4)),
            "target_ongoing_requests": 16,
        },
    ).bind(options["repository"], max_batch_size=int(options.get("max_batch_size", 32)))
    return Protocol.bind(options["repository"], replicas)
