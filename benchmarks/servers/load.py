"""Clients in a closed loop: each sends its next request when it has its answer, over a connection that stays open."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DATATYPES = {"float32": "FP32", "int64": "INT64"}


@dataclass(frozen=True)
class Load:
    """What clients saw.

    Attributes:
        seconds: from the first request to the last answer.
        latencies_s: one per answer.
        computed_s: how long the model computed for each, as the server tells in `Server-Timing`; 0: it does not.
    """

    seconds: float
    latencies_s: list[float]
    computed_s: list[float] = field(default_factory=list)

    @property
    def request_s(self) -> float:
        """Seconds per answered request, of all clients together."""
        return self.seconds / len(self.latencies_s)

    @property
    def around_s(self) -> float:
        """Median of what a latency has beside the model's own time, in seconds."""
        return float(np.median(np.subtract(self.latencies_s, self.computed_s)))

    def quantile_s(self, part: float) -> float:
        """Return the latency that a part of the answers does not exceed."""
        return float(np.quantile(self.latencies_s, part))


def message(model: str, inputs: dict[str, np.ndarray], host: str) -> bytes:
    """Return an HTTP request of the Open Inference Protocol, tensors as binary data."""
    tensors, data = [], b""
    for name, value in inputs.items():
        raw = value.tobytes()
        tensors.append({**_described(name, value), "parameters": {"binary_data_size": len(raw)}})
        data += raw
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + data


def _described(name: str, value: np.ndarray) -> dict[str, object]:
    return {"name": name, "datatype": DATATYPES[str(value.dtype)], "shape": list(value.shape)}


def first_answer(port: int, model: str, inputs: dict[str, np.ndarray], output: str) -> np.ndarray:
    """Return the values of an output, asked for as JSON."""
    tensors = [{**_described(name, value), "data": value.ravel().tolist()} for name, value in inputs.items()]
    url = f"http://127.0.0.1:{port}/v2/models/{model}/infer"
    body = json.dumps({"inputs": tensors}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
        outputs = {each["name"]: each["data"] for each in json.load(answer)["outputs"]}
    return np.array(outputs[output])


def packed(array: np.ndarray) -> dict[str, Any]:
    """Return an array as LitServe's requests and answers have it here."""
    return {"dtype": str(array.dtype), "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}


def unpacked(entry: dict[str, Any]) -> np.ndarray:
    """Return the array that `packed` was given."""
    return np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])


def lit_message(model: str, inputs: dict[str, np.ndarray], host: str) -> bytes:
    """Return an HTTP request for LitServe."""
    body = json.dumps({name: packed(value) for name, value in inputs.items()}).encode()
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def first_lit_answer(port: int, request: bytes) -> np.ndarray:
    """Return the values that LitServe answers a request of `lit_message` with."""
    url = f"http://127.0.0.1:{port}{request.split()[1].decode()}"
    body = request.partition(b"\r\n\r\n")[2]
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
        return unpacked(json.load(answer)).ravel()


async def _answer(reader: asyncio.StreamReader) -> float:
    """Read an answer; return how long the model computed for it, 0 if the server does not tell."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if " 200 " not in head.split("\r\n")[0]:
        raise RuntimeError(head.split("\r\n")[0])
    timing = re.search(r"\r\nserver-timing: .*compute;dur=([0-9.]+)", head)
    computed_s = float(timing[1]) / 1e3 if timing else 0.0
    size = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), None)
    if size is not None:
        await reader.readexactly(size)
        return computed_s
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:  # in chunks
        await reader.readexactly(size + 2)
    await reader.readexactly(2)
    return computed_s


async def _client(port: int, messages: Sequence[bytes], first: int, end: float, seen: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    index = first
    while time.perf_counter() < end:
        begin = time.perf_counter()
        writer.write(messages[index % len(messages)])
        computed_s = await _answer(reader)
        seen.latencies_s.append(time.perf_counter() - begin)
        seen.computed_s.append(computed_s)
        index += 1
    writer.close()


def load(port: int, messages: Sequence[bytes], *, clients: int, seconds: float) -> Load:
    """Return what `clients` saw within some seconds.

    Raises:
        OSError: the server closed a connection.
        RuntimeError: a request was answered with another status than 200.
    """

    async def run() -> Load:
        seen = Load(seconds, [])
        begin = time.perf_counter()
        await asyncio.gather(*(_client(port, messages, first, begin + seconds, seen) for first in range(clients)))
        return dataclasses.replace(seen, seconds=time.perf_counter() - begin)

    return asyncio.run(run())
