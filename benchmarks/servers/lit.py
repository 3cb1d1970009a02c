"""LitServe's server of an eager model: `python -m benchmarks.servers.lit MODEL PORT`.

It has a protocol of its own: JSON, here with tensors as base64, at the route of the other servers.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch

from benchmarks.servers.load import packed, unpacked
from benchmarks.servers.models import SERVED, ServedModel


class Api(litserve.LitAPI):
    """Answers by the model's own code, in inference mode."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(api_path=f"/v2/models/{model.name}/infer")
        self._name = model.name

    def setup(self, device: str) -> None:
        self._model = SERVED[self._name]
        self._module = self._model.module()

    def decode_request(self, request):
        return {name: torch.tensor(unpacked(entry)) for name, entry in request.items()}

    def predict(self, x: dict[str, Any]) -> Any:
        with torch.inference_mode():
            return self._module(**x)[self._model.output].numpy()

    def encode_response(self, output):
        return packed(output)


def main() -> None:
    """Serve until the process is told to end."""
    name, port = sys.argv[1:]
    server = litserve.LitServer(Api(SERVED[name]), accelerator="cpu", healthcheck_path="/v2/health/ready")
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
