"""A peer's server: `python -m benchmarks.servers.peers SYSTEM MODEL DIRECTORY PORT`.

Eager and ONNX Runtime stand behind the same server of KServe that bundles stand behind, and get the same requests.
Neither joins requests: KServe's server does not. Each runs in one thread, in which it was loaded: with a second thread
that has run operators, OpenMP's threads sleep between two of them. Answers are bytes where the client asks for bytes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.servers.models import SERVED, ServedModel

Run = Callable[[dict[str, np.ndarray]], np.ndarray]


def eager(model: ServedModel, directory: Path) -> Run:
    """Return the model's own code, in inference mode."""
    import torch

    module = model.module()

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            tensors = {name: torch.tensor(value) for name, value in inputs.items()}
            return module(**tensors)[model.output].numpy()

    return run


def onnx_runtime(model: ServedModel, directory: Path) -> Run:
    """Return a session on what `torch.onnx.export` has written, with as many threads as torch would have."""
    import os

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), options, ["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def empty(model: ServedModel, directory: Path) -> Run:
    """Return what computes nothing, and answers as many bytes as the model: the server's own time."""
    return lambda inputs: np.zeros(model.answer(next(iter(inputs.values())).shape[-1]), np.float32)


PEERS = {"eager": eager, "ONNX Runtime": onnx_runtime, "empty": empty}


def main() -> None:
    """Serve until the process is told to end."""
    import kserve

    logging.disable(logging.INFO)  # a line or three per request
    system, name, directory, port = sys.argv[1:]
    served = SERVED[name]
    thread = ThreadPoolExecutor(1)
    run = thread.submit(PEERS[system], served, Path(directory)).result()

    class Peer(kserve.Model):
        def __init__(self) -> None:
            super().__init__(name)
            self.ready = True

        async def predict(self, payload: kserve.InferRequest, headers=None, response_headers=None):
            inputs = {each.name: each.as_numpy() for each in payload.inputs}
            result = await asyncio.get_running_loop().run_in_executor(thread, run, inputs)
            in_bytes = payload.use_binary_outputs
            output = kserve.InferOutput(served.output, list(result.shape), "FP32")
            output.set_data_from_numpy(result, binary_data=in_bytes)
            return kserve.InferResponse(payload.id or "0", name, [output], use_binary_outputs=in_bytes)

    kserve.ModelServer(http_port=int(port), enable_grpc=False, access_log_format=None).start([Peer()])


if __name__ == "__main__":
    main()
