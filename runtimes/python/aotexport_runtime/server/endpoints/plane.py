"""The models of a repository as KServe asks for them, and requests of either protocol, counted and logged."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aotexport_runtime
from aotexport_runtime.errors import NotSupported, Overloaded
from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.account import Asked, note, provider_of
from aotexport_runtime.server.marks import Marks
from aotexport_runtime.server.messages import Request, Signature
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import Refusal, refusal_of
from aotexport_runtime.server.repository import Repository, Served
from aotexport_runtime.server.triton_config import model_config
from aotexport_runtime.serving.batcher import Answer
from aotexport_runtime.serving.servable import Servable

Reply = TypeVar("Reply")
Hold = Callable[[int], None]
"""Takes account of bytes of a request; `Refusal`: all requests hold too many."""

_EXTENSIONS = ["model_repository", "binary_tensor_data", "model_configuration", "statistics"]
ENDING = "the server is ending; ask another"
_CODED_AT_ONCE_NBYTES = 1 << 18
_CODERS = ThreadPoolExecutor(2, "aotexport coding")
"""Not the threads of `asyncio.to_thread`, all of which may wait for a model that is being loaded."""


class BundlePlane:
    """What KServe calls a data plane, with its extension for repositories: index, load and unload for every worker."""

    def __init__(self, repository: Repository, options: ServeOptions, marks: Marks) -> None:
        self.repository = repository
        self._options = options
        self._marks = marks
        self._running: set[asyncio.Task[Any]] = set()
        self._is_ending = self._is_over = False
        self._held_nbytes = 0
        self.spans = provider_of(dict(os.environ))
        self._note = functools.partial(note, spans=self.spans, is_logged=options.access_log == "on")

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return {"name": "aotexport", "version": aotexport_runtime.__version__, "extensions": _EXTENSIONS}

    async def live(self) -> dict[str, str]:
        """Return that the process answers."""
        return {"status": "alive"}

    def models(self) -> dict[str, Any]:
        """Return the names of the models."""
        return {"models": [*self.repository.models]}

    @property
    def unready(self) -> str:
        """Why the server is not ready; empty: it is."""
        return ENDING if self._is_ending else self.repository.unready

    async def ready(self) -> bool:
        """Return whether what was promised is served."""
        return not self.unready

    @contextlib.contextmanager
    def holding(self) -> Generator[Hold]:
        """Count the bytes of a request until the end of the block, together with those of all others."""
        own = 0

        def hold(nbytes: int) -> None:
            nonlocal own
            own, self._held_nbytes = own + nbytes, self._held_nbytes + nbytes
            if self._held_nbytes > (most := self._options.max_held_bytes):
                text = f"requests hold more than {most} bytes, see `--max-held-bytes`; try again later"
                raise Refusal(text, "overloaded")

        try:
            yield hold
        finally:
            self._held_nbytes -= own

    async def drain(self) -> None:
        """Refuse what comes, and return when what runs is answered; what takes longer than it may is refused."""
        self._is_ending = True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._options.drain_s)
            self._is_over = True
            for task in late:
                task.cancel()

    async def loaded(self, name: str, version: str = "") -> Served:
        """Return what answers calls of a model, loading it if it has to be.

        Raises:
            Refusal: there is no such model or version, or it cannot be served.
        """
        if self._options.workers > 1 and self._marks.is_behind(name):
            await asyncio.to_thread(self._marks.follow, self.repository)
        while (served := self.repository.current(name, version)) is None:
            await asyncio.to_thread(self.repository.demand, name)
        return served

    async def model_metadata(self, model_name: str, version: str = "") -> dict[str, Any]:
        """Return the inputs and outputs of a model."""
        model = self.repository.model(model_name)
        if not model.chosen:
            await self.loaded(model_name, version)
        version = version or next((bundle.version for bundle in model.chosen), "")
        self.repository.current(model_name, version)
        signature = model.signatures.get(version)
        if signature is None:
            raise Refusal(f"model `{model_name}` is being loaded", "unavailable")
        return {
            "name": model_name,
            "platform": "aotexport",
            "versions": [bundle.version for bundle in model.chosen],
            **signature.described(),
        }

    async def model_config(self, model_name: str, version: str = "") -> dict[str, Any]:
        """Return the config of a model as Triton's clients read it."""
        served = await self.loaded(model_name, version)
        servable = served.servable
        most = servable.batcher.max_batch_size
        return model_config(model_name, served.signature, servable.batch_axes, most, "aotexport")

    def statistics(self, model_name: str = "", version: str = "") -> dict[str, Any]:
        """Return what was counted of a model, or of all, by version; `Refusal`: there is no such model or version."""
        if model_name:
            self.repository.current(model_name, version)
        models = [self.repository.model(model_name)] if model_name else [*self.repository.models.values()]
        pairs = [(m.name, bundle.version) for m in models for bundle in m.chosen if version in ("", bundle.version)]
        return {"model_stats": metrics.statistics(pairs)}

    async def model_ready(self, model_name: str) -> bool:
        """Return whether a model is served."""
        return self.repository.model(model_name).state == "READY"

    async def index(self, filter_ready: bool | None = False) -> list[dict[str, str]]:
        """Return name, state and reason of every model, for each version that is served."""
        models = [m for m in [*self.repository.models.values()] if not filter_ready or m.state == "READY"]
        return [
            {"name": m.name, "version": bundle.version, "state": m.state, "reason": m.reason}
            for m in models
            for bundle in m.chosen or m.candidates[:1]
        ]

    def check_admin(self, authorization: str, *, is_own_port: bool = False) -> None:
        """Refuse to load and unload (`Refusal`) elsewhere than at a port for it, and without the token."""
        if self._options.admin_port is not None and not is_own_port:
            raise Refusal("models are loaded and unloaded at the port of `--admin-port`", "forbidden")
        token = self._options.admin_token()
        if token and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise Refusal("loading and unloading needs the token of `--admin-token-file`", "unauthorized")

    async def load(self, model_name: str) -> dict[str, Any]:
        """Load the versions of a model; `Refusal`: there are none, or one fails."""
        await asyncio.to_thread(self.repository.load, model_name)
        self._marks.set(model_name, unloaded=False)
        return {"name": model_name, "load": True}

    async def unload(self, model_name: str) -> dict[str, Any]:
        """Let a model go when it has answered what it was asked; `Refusal`: there is none."""
        await asyncio.to_thread(self.repository.unload, model_name)
        self._marks.set(model_name, unloaded=True)
        return {"name": model_name, "unload": True}

    async def answer(
        self,
        protocol: str,
        model: str,
        version: str,
        read: Callable[[Signature, Hold], Awaitable[Request]],
        write: Callable[[Request, Served, Answer], Reply],
        traceparent: str = "",
    ) -> Reply:
        """Return the reply to a request, which `read` reads by the signature of the model, and `write` writes.

        A client that goes away cancels the task; what waits is then not computed.

        Raises:
            Refusal: the request is not answered; says why.
        """
        async with self.accounted(Asked(model=model, protocol=protocol, traceparent=traceparent)) as asked:
            with self.holding() as hold:
                return await self._reply(asked, version, lambda signature: read(signature, hold), write)

    @contextlib.asynccontextmanager
    async def accounted(self, asked: Asked) -> AsyncGenerator[Asked]:
        """Count and log a request, which is answered in the block; its errors become refusals."""
        outcome, text = "cancelled", ""
        task: Any = asyncio.current_task()
        self._running.add(task)
        try:
            if self._is_ending:
                raise Refusal(ENDING, "unavailable")
            yield asked
            outcome = "ok"
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            outcome, text = "unavailable", ENDING
            raise Refusal(ENDING, "unavailable") from None
        except Exception as error:
            refusal = refusal_of(error)
            outcome, text = refusal.kind, str(refusal)
            raise refusal from error
        finally:
            self._running.discard(task)
            # When the reply has been sent.
            seconds = time.monotonic() - asked.began
            asyncio.get_running_loop().call_soon(functools.partial(self._note, asked, outcome, text, seconds))

    async def _reply(
        self,
        asked: Asked,
        version: str,
        read: Callable[[Signature], Awaitable[Request]],
        write: Callable[[Request, Served, Answer], Reply],
    ) -> Reply:
        begins, wait_s = asyncio.get_running_loop().time(), self._options.request_timeout_s
        try:
            async with asyncio.timeout(wait_s) as limit:
                asked.served = served = await self.loaded(asked.model, version)
                tensors_of(served, asked.model)
                limit.reschedule(None)  # `read` has a limit of its own
                request = await read(served.signature)
                asked.id = request.id
                wait_s = min(request.timeout_s or wait_s, wait_s, served.bundle.request_timeout_s)
                limit.reschedule(begins + wait_s)
                # Not by `DataPlane.infer`: it measures each request once more, for a tenth of a millisecond.
                deadline = asked.began + wait_s

                async def submit(served: Served) -> Answer:
                    left_s = deadline - time.monotonic()
                    servable = tensors_of(served, asked.model)
                    alone = len(self._running) == 1
                    return servable.submit(request.inputs, timeout_s=left_s, adapter=request.adapter, at_once=alone)

                served, answer = await self.submit(asked.model, version, submit, served)
                asked.served, outputs = served, await _result_of(answer)
                asked.answer = answer
        except TimeoutError:
            raise Refusal(f"the request was not answered within {wait_s * 1e3:g} ms", "deadline") from None
        nbytes = sum(outputs[name].nbytes for name in request.outputs)
        return await coded(nbytes, write, request, served, answer)

    async def submit(
        self, name: str, version: str, submit: Callable[[Served], Awaitable[Reply]], served: Served | None = None
    ) -> tuple[Served, Reply]:
        """Return what serves a model, `served` if it still does, and what `submit`, which queues a call of it, returns.

        Raises:
            Refusal: see `loaded`, or too many wait already.
        """
        while True:
            served = served or await self.loaded(name, version)
            try:
                return served, await submit(served)
            except Overloaded:
                most = served.servable.batcher.max_waiting
                text = f"{most} requests wait for model `{name}` already, see `--max-waiting`; try again later"
                raise Refusal(text, "overloaded") from None
            except NotSupported:
                # The version was swapped between these two lines, and is closed.
                if self.repository.model(name).served.get(served.version) is served:
                    raise
                served = None


async def coded(nbytes: int, code: Callable[..., Reply], *arguments: Any) -> Reply:
    """Return what a function reads or writes; more than a little in a thread, while the event loop serves others."""
    if nbytes <= _CODED_AT_ONCE_NBYTES:
        return code(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_CODERS, code, *arguments)


async def _result_of(answer: Answer) -> Any:
    """Return the result of a call when it is there; as `asyncio.wrap_future`, in half the time."""
    if answer.done():
        return answer.result()
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

    answer.add_done_callback(tell)
    try:
        await done
    except asyncio.CancelledError:
        answer.cancel()
        raise
    return answer.result()


def tensors_of(served: Served, model: str) -> Servable:
    """Return a servable that takes and returns tensors; refuse one that generates text."""
    if isinstance(served.servable, Servable):
        return served.servable
    raise Refusal(f"model `{model}` generates text; ask POST /v1/completions")
