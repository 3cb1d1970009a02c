"""One request of either protocol, from its model to its answer, counted and logged."""
# kserve is an extra, and its packages are not where types are checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.endpoints.models import Answered, BundlePlane
from aotexport_runtime.server.messages import Request, Signature
from aotexport_runtime.server.refusals import Refusal, refusal_of

log = logging.getLogger("aotexport_runtime.server.access")

Reply = TypeVar("Reply")


class Inference:
    """Answers requests by the models of a data plane."""

    def __init__(self, plane: BundlePlane, *, access_log: bool) -> None:
        """Take requests for `plane`; with `access_log`, write a line for each."""
        self._plane = plane
        self._access_log = access_log

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
            signature = (await self._plane.loaded(model, version)).signature
            request = await read(signature)
            # Not by `DataPlane.infer`: it measures each request once more, for a tenth of a millisecond.
            answered = await (await self._plane.get_model(model)).predict(request)
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
            seconds = time.monotonic() - began
            # When the reply has been sent.
            note = functools.partial(self._note, protocol, model, request, answered, outcome, text, seconds)
            asyncio.get_running_loop().call_soon(note)

    def _note(
        self,
        protocol: str,
        model: str,
        request: Request | None,
        answered: Answered | None,
        outcome: str,
        text: str,
        seconds: float,
    ) -> None:
        version = answered.version if answered else ""
        # Names that a client invents are no labels.
        label = "" if outcome == "not_found" else model
        metrics.REQUESTS.labels(label, version, protocol, outcome).inc()
        fields: dict[str, Any] = {"id": request.id if request else "", "model": model[:100], "version": version}
        fields |= {"protocol": protocol, "outcome": outcome, "ms": round(seconds * 1e3, 3)}
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
        if self._access_log:
            log.info("request", extra={"fields": fields})


def refusal_of_kserve(error: Exception) -> Refusal:
    """Return what a client is told of an error of KServe's routes."""
    import kserve.errors

    if isinstance(error, kserve.errors.ModelNotFound):
        return Refusal(str(error), "not_found")
    if isinstance(error, kserve.errors.ModelNotReady | kserve.errors.ServerNotReady | kserve.errors.ServerNotLive):
        return Refusal(str(error), "unavailable")
    if isinstance(error, kserve.errors.InvalidInput):
        return Refusal(str(error))
    return refusal_of(error)
