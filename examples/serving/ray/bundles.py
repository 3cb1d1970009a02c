"""Serves a directory of bundles by Ray Serve, with replicas that come and go with the load.

    serve run bundles:app repository=/srv/bundles         # this machine
    serve deploy config.yaml                              # a cluster, see README.md

A request is one of the Open Inference Protocol, as JSON or with binary tensors, read and answered by the server's code
(`aotexport_runtime.server.messages`). A replica loads the models that it is asked for; one answers once its recorded
calls gave what eager gave. Replicas join waiting calls by the batcher of `Servable`, along the axis where a bundle's
calls may be joined; where a batch fails, each runs alone.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from ray import serve

from aotexport_runtime import Servable
from aotexport_runtime.server.messages import Signature, read_request, write_answer
from aotexport_runtime.server.refusals import CODES, Refusal, refusal_of

JSON_NBYTES = "inference-header-content-length"
Reply = tuple[int, bytes, int | None]
"""Status and body of an answer, and how much of it is JSON; None: all."""

http = FastAPI()


def refused(error: Exception) -> Reply:
    """Return the answer to a request that is not answered, as the server has it."""
    refusal = refusal_of(error)
    return CODES[refusal.kind][0], msgspec.json.encode({"error": str(refusal)}), None


def response(status: int, body: bytes, json_nbytes: int | None) -> Response:
    """Return a response of HTTP."""
    headers = {} if json_nbytes is None else {JSON_NBYTES: str(json_nbytes)}
    kind = "application/json" if json_nbytes is None else "application/octet-stream"
    return Response(body, status_code=status, media_type=kind, headers=headers)


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

    async def metadata(self, name: str) -> Reply:
        """Return the inputs and outputs of a model."""
        try:
            servable = await self.servable(name)
            signature = Signature.of(servable.inputs, servable.outputs, servable.texts)
        except Exception as error:
            return refused(error)
        about = {"name": name, "platform": "aotexport", "versions": ["1"], **signature.described()}
        return 200, msgspec.json.encode(about), None

    async def infer(self, name: str, body: bytes, json_nbytes: int | None, request_id: str) -> Reply:
        """Answer a request, of whose body so much is JSON; None: all."""
        try:
            servable = await self.servable(name)
            signature = Signature.of(servable.inputs, servable.outputs, servable.texts)
            asked = read_request(bytearray(body), json_nbytes, signature, request_id)
            wait_s = min(asked.timeout_s or self._timeout_s, self._timeout_s)
            answer = servable.submit(asked.inputs, timeout_s=wait_s, adapter=asked.adapter)
            outputs = await asyncio.wait_for(asyncio.wrap_future(answer), wait_s)
        except TimeoutError:
            return refused(Refusal("the request was not answered within its time", "deadline"))
        except Exception as error:
            return refused(error)
        return 200, *write_answer(asked, name, "1", outputs, signature)


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(http)
class Protocol:
    """The HTTP side: sends a request to a replica that has its model already, if there is one."""

    def __init__(self, repository: str, bundles: serve.handle.DeploymentHandle) -> None:
        self._repository = Path(repository)
        self._bundles = bundles

    @http.get("/v2/health/{kind}")
    async def health(self, kind: Literal["live", "ready"]) -> dict[str, bool]:
        """Answer once replicas take requests."""
        return {kind: True}

    @http.get("/v2/models/{name}")
    async def metadata(self, name: str) -> Response:
        """Return the inputs and outputs of a model."""
        return await self._answer(name, "metadata")

    @http.get("/v2/models/{name}/ready")
    async def model_ready(self, name: str) -> Response:
        """Answer once a model has passed its self-test, or say why it has not."""
        return await self._answer(name, "metadata")

    @http.post("/v2/models/{name}/infer")
    async def infer(self, name: str, request: Request) -> Response:
        """Answer a request for a model of the repository."""
        header = request.headers.get(JSON_NBYTES)
        if header is not None and not (header.isascii() and header.isdecimal()):
            return response(*refused(Refusal(f"the header `{JSON_NBYTES}` is no length")))
        json_nbytes = None if header is None else int(header)
        return await self._answer(
            name, "infer", await request.body(), json_nbytes, request.headers.get("x-request-id", "")
        )

    async def _answer(self, name: str, method: str, *arguments: Any) -> Response:
        if name not in {each.name for each in self._repository.iterdir()}:
            return response(*refused(Refusal(f"there is no model `{name}`", "not_found")))
        handle = self._bundles.options(multiplexed_model_id=name)
        return response(*await getattr(handle, method).remote(name, *arguments))


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
