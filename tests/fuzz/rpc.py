"""`python -m tests.fuzz.rpc --cases N`: send mutated messages of the Open Inference Protocol to a server by gRPC.

It needs KServe, and starts a server of its own. Every message is answered, or refused by a code of the protocol and one
sentence; the server lives on, and answers as before. A case is drawn from the seed and its number.
"""

import argparse
import collections
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import torch
from tritonclient.grpc import service_pb2 as pb

import aotexport
from tests.fuzz.bundles import SEED
from tests.fuzz.mutations import Mutator
from tests.serving.server import Server, serving
from tests.unit.serving.conftest import MODELS

RESULTS = Path(__file__).parent / "results" / "rpc.json"
SERVED = ("digits", "kinds", "pair", "words")
_SERVICE = "/inference.GRPCInferenceService/"
_NAMES = ("", "x", "none", "../digits", "a b", "é" * 40, "\x1b[31m", "x" * 10_000, "\u0000")
_SIZES = (-(1 << 63), -1, 0, 1, 2, 3, 7, 64, 65, 1 << 20, 1 << 31, 1 << 62, (1 << 63) - 1)
_FORMS = {"BOOL": "?", "INT64": "q", "FP16": "e", "BF16": "H", "FP32": "f"}
_CONTENTS = {"BOOL": "bool_contents", "INT64": "int64_contents", "FP32": "fp32_contents", "BYTES": "bytes_contents"}
_DATATYPES = (*_FORMS, "BYTES", "FP64", "INT8", "UINT64", "", "FP99", "fp32")
_CODES = frozenset(("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"))


class Client:
    """Sends bytes to the methods of a server.

    Attributes:
        models: name of each model to its metadata.
    """

    def __init__(self, address: str) -> None:
        """Connect, and ask for the models' metadata."""
        self._channel = grpc.insecure_channel(address)
        self._methods = dict[str, Callable[..., bytes]]()
        asked = {name: pb.ModelMetadataRequest(name=name) for name in SERVED}
        answers = {name: self.send("ModelMetadata", message.SerializeToString()) for name, message in asked.items()}
        self.models = {name: pb.ModelMetadataResponse.FromString(answer) for name, (_, answer) in answers.items()}

    def send(self, method: str, data: bytes) -> tuple[str, bytes]:
        """Return the code of the answer, and its bytes, or those of the sentence."""
        if method not in self._methods:
            self._methods[method] = self._channel.unary_unary(f"{_SERVICE}{method}")
        try:
            return "OK", self._methods[method](data, timeout=60)
        except grpc.RpcError as error:
            return error.code().name, (error.details() or "").encode()

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()


def valid(mutator: Mutator, metadata: Any) -> Any:
    """Return a request that a model takes."""
    message, in_raw = pb.ModelInferRequest(model_name=metadata.name), mutator.random.random() < 0.6
    for tensor in metadata.inputs:
        shape = [mutator.random.randint(2, 3) if size == -1 else size for size in tensor.shape]
        entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        count = math.prod(shape)
        values: list[Any] = [mutator.random.randrange(2) for _ in range(count)]
        if tensor.datatype == "BYTES":
            values = [b"up"] * count
        if in_raw or any(each.datatype not in _CONTENTS for each in metadata.inputs):
            message.raw_input_contents.append(_raw(tensor.datatype, values))
        else:
            getattr(entry.contents, _CONTENTS[tensor.datatype]).extend(values)
    return message


def _raw(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(each)) + each for each in values)
    return struct.pack(f"<{len(values)}{_FORMS[datatype]}", *values)


def _rename(draw: Any, message: Any) -> None:
    field = draw.choice(("model_name", "model_version", "id"))
    setattr(message, field, draw.choice((*_NAMES[:-1], "digits", "words", "1", "7")))


def _change_input(draw: Any, message: Any) -> None:
    if message.inputs:
        entry, kind = draw.choice(message.inputs), draw.randrange(4)
        if kind == 0:
            entry.name = draw.choice(_NAMES)
        elif kind == 1:
            entry.datatype = draw.choice(_DATATYPES)
        elif kind == 2 and entry.shape:
            entry.shape[draw.randrange(len(entry.shape))] = draw.choice(_SIZES)
        else:
            shape = draw.choice(([], [1], [0], [*entry.shape, 1], [1] * 40, [1 << 31, 1 << 31], [1 << 62, 4, 0]))
            del entry.shape[:]
            entry.shape.extend(shape)


def _change_number_of_inputs(draw: Any, message: Any) -> None:
    if message.inputs and draw.random() < 0.5:
        message.inputs.add().CopyFrom(draw.choice(message.inputs))
    elif message.inputs:
        del message.inputs[draw.randrange(len(message.inputs))]


def _change_raw(draw: Any, message: Any) -> None:
    raw, kind = message.raw_input_contents, draw.randrange(5)
    if not raw or kind == 0:
        raw.append(draw.randbytes(draw.choice((0, 1, 4, 32, 1 << 16))))
    elif kind == 1:
        del raw[draw.randrange(len(raw))]
    else:
        at = draw.randrange(len(raw))
        data = raw[at]
        raw[at] = draw.choice((b"", data[:-1], data + b"x", draw.randbytes(len(data)), b"\xff" * len(data), data * 2))


def _change_contents(draw: Any, message: Any) -> None:
    if message.inputs:
        contents = draw.choice(message.inputs).contents
        field = draw.choice(("bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"))
        values = {"bytes": [b"\xff", b"up"], "fp32": [1e30, math.nan], "fp64": [math.inf]}.get(field, [1, 0])
        getattr(contents, f"{field}_contents").extend(values * draw.choice((1, 1, 100)))


def _change_outputs(draw: Any, message: Any) -> None:
    for _ in range(draw.choice((1, 2))):
        message.outputs.add(name=draw.choice((*_NAMES, "output", "sum")))


def _change_parameters(draw: Any, message: Any) -> None:
    parameter = message.parameters[draw.choice(("timeout", "adapter", "x", "binary_data_output", "priority"))]
    if draw.random() < 0.6:
        parameter.int64_param = draw.choice(_SIZES)
    else:
        parameter.string_param = draw.choice(_NAMES)


_CHANGES = (
    *(_rename, _change_input, _change_input, _change_number_of_inputs, _change_raw, _change_raw),
    *(_change_contents, _change_outputs, _change_parameters),
)


def case(number: int, models: dict[str, Any]) -> tuple[str, bytes]:
    """Return a method, and the bytes of its message."""
    mutator = Mutator(f"{SEED} rpc {number}")
    draw = mutator.random
    if draw.random() < 0.1:
        method = draw.choice(("ModelReady", "ModelMetadata", "RepositoryModelLoad", "ServerReady"))
        kind = {"RepositoryModelLoad": pb.RepositoryModelLoadRequest, "ServerReady": pb.ServerReadyRequest}
        message = kind.get(method, pb.ModelMetadataRequest)()
        if method == "RepositoryModelLoad":
            message.model_name = draw.choice(_NAMES)
        elif method != "ServerReady":
            message.name = draw.choice((*_NAMES, *SERVED))
            message.version = draw.choice(("", "", "1", *_NAMES))
        return method, mutator.bytes_changed(message.SerializeToString()) if draw.random() < 0.3 else (
            message.SerializeToString()
        )
    message = valid(mutator, models[draw.choice(SERVED)])
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        draw.choice(_CHANGES)(draw, message)
    data = message.SerializeToString()
    return "ModelInfer", mutator.bytes_changed(data) if draw.random() < 0.15 else data


def outcome(method: str, code: str, answer: bytes) -> str:
    """Return the code of an answer, or what is wrong with it, which begins with `!`."""
    if code not in _CODES:
        return f"!{method}: {code}: {answer[:100]!r}"
    if code != "OK":
        text = answer.decode()
        is_sentence = bool(text) and text.isprintable() and "Traceback" not in text
        return code if is_sentence else f"!{method}: {code}: no sentence: {text[:100]!r}"
    if method == "ModelInfer":
        found = pb.ModelInferResponse.FromString(answer)
        for tensor, raw in zip(found.outputs, found.raw_output_contents, strict=True):
            if len(raw) != math.prod(tensor.shape) * struct.calcsize(_FORMS[tensor.datatype]):
                return f"!`{tensor.name}`: {len(raw)} bytes of {tensor.datatype}{list(tensor.shape)}"
    return code


def outcomes(server: Server, numbers: range) -> Iterator[tuple[int, str]]:
    """Send cases to a server; yield number and outcome of each, and last whether the server lives and answers."""
    client = Client(server.grpc)
    mutator = Mutator("before and after")
    requests = [valid(mutator, metadata).SerializeToString() for metadata in client.models.values()]
    before = [client.send("ModelInfer", data) for data in requests]
    for number in numbers:
        method, data = case(number, client.models)
        yield number, outcome(method, *client.send(method, data))
    after = [client.send("ModelInfer", data) for data in requests]
    client.close()
    if server.lines("worker has ended") or [_tensors(each) for each in after] != [_tensors(each) for each in before]:
        yield numbers.stop, "!the server answers no longer as before"


def _tensors(answered: tuple[str, bytes]) -> tuple[str, list[bytes]]:
    code, answer = answered
    return code, [*pb.ModelInferResponse.FromString(answer).raw_output_contents]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.rpc", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="cases of the whole record, with those of it")
    options = parser.parse_args()
    record: dict[str, Any] = {"seed": SEED, "grpc": grpc.__version__, "next": 0, "messages": {}, "wrong": []}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text())
    found = collections.Counter[str](record["messages"])
    with tempfile.TemporaryDirectory() as directory:
        for name in SERVED:
            make, arguments, sizes = MODELS[name]
            torch.manual_seed(0)
            place = Path(directory, name, "1")
            place.parent.mkdir()
            aotexport.export(
                make().eval(), arguments, output=place, dynamic_shapes=sizes, programs=("infer",), verify=False
            )
        with serving(directory) as server:
            for number, result in outcomes(server.wait_until_ready(), range(record["next"], options.cases)):
                found["wrong" if result.startswith("!") else result] += 1
                if result.startswith("!"):
                    record["wrong"].append([number, result])
                    print(number, result, flush=True)
                if number % 1000 == 999 or number == options.cases - 1:
                    record |= {"next": number + 1, "messages": dict(found.most_common())}
                    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
