"""`python -m tests.fuzz.rpc --cases N`: send mutated messages of the Open Inference Protocol to a server by gRPC.

It needs KServe, and starts a server of its own. Every message is answered, or refused by a code of the protocol and one
sentence; the server lives on, and answers as before. A case is drawn from the seed and its number.
"""

import argparse
import collections
import copy
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

import aotexport
from tests.fuzz.bundles import SEED
from tests.fuzz.mutations import Mutator
from tests.serving.server import Server, serving
from tests.unit.serving.conftest import MODELS

RESULTS = Path(__file__).parent / "results" / "rpc.json"
SERVED = ("digits", "kinds", "pair", "words")
_SERVICE = "/inference.GRPCInferenceService/"
_SIZES = (-(1 << 63), -1, 0, 1, 2, 3, 7, 64, 65, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1)
_LENGTHS = (0, 1, 4, 32, 1 << 16)
_FLOATS = (0.0, 1.0, 1e30, -math.inf, math.nan)
_FORMS = {"BOOL": "?", "INT64": "q", "FP16": "e", "BF16": "H", "FP32": "f"}
_CONTENTS = {"BOOL": "bool_contents", "INT64": "int64_contents", "FP32": "fp32_contents", "BYTES": "bytes_contents"}
_DATATYPES = (*_FORMS, "BYTES", "FP64", "INT8", "UINT64", "FP99", "fp32")
_PARAMETERS = ("timeout", "timeout", "adapter", "x", "binary_data_output", "priority")
_NAMES = ("", "x", "none", "../digits", "a b", "é" * 40, "\x1b[31m", "x" * 10_000, "\u0000", "1", "7", "output", "sum")
_TEXTS = (*_NAMES, *SERVED, *_DATATYPES)
_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_OTHERS: tuple[Callable[[str], Any], ...] = (
    lambda name: pb.ModelReadyRequest(name=name),
    lambda name: pb.ModelMetadataRequest(name=name),
    lambda name: pb.RepositoryModelLoadRequest(model_name=name),
    lambda _: pb.ServerReadyRequest(),
)
"""Make messages of other methods than `ModelInfer` about a model."""
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


def _places(message: Any, *, all_fields: bool) -> Iterator[tuple[Any, Any]]:
    """Yield fields of a message and of those in it, with the message that has it: all, or maps and what is set."""
    is_set = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if all_fields or is_map or field.name in is_set:
            held = getattr(message, field.name)
            # Each of several byte strings is a tensor.
            yield from [(message, field)] * (len(held) or 1 if field.type == field.TYPE_BYTES else 1)
            for inner in () if is_map or field.message_type is None else held if field.is_repeated else (held,):
                yield from _places(inner, all_fields=all_fields)


def change(draw: Random, message: Any, *, all_fields: bool = True) -> None:
    """Change a field at any depth: it gets another value, or is cleared; in a list, entries come, go or repeat."""
    places = [*_places(message, all_fields=all_fields)]
    if not places:
        return
    owner, field = draw.choice(places)
    held, kind = getattr(owner, field.name), field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        change(draw, held[draw.choice(_PARAMETERS)])
    elif field.is_repeated:
        begin, entries = draw.randrange(len(held) + 1), copy.deepcopy([*held])
        end = draw.choice((begin + 1, len(held)))
        old = entries[begin:end] or [_changed(draw, field, b"" if kind is None else GetMessageClass(kind)())]
        changed = [_changed(draw, field, old[0])]
        entries[begin:end] = draw.choice((changed, changed, changed, [], old * 2, old * 100))
        owner.ClearField(field.name)
        getattr(owner, field.name).extend(entries)
    elif kind is not None:
        owner.ClearField(field.name)
    else:
        setattr(owner, field.name, _changed(draw, field, held))


def _changed(draw: Random, field: Any, old: Any) -> Any:
    """Return another value of a field, or another entry of a list."""
    if field.message_type is not None:
        change(draw, made := copy.deepcopy(old))
        return made
    if field.type == field.TYPE_BYTES:
        drawn = draw.randbytes(len(old)), draw.randbytes(draw.choice(_LENGTHS))
        return draw.choice((b"", b"up", old[:-1], old + b"x", old * 2, b"\xff" * len(old), *drawn))
    if field.type in _RANGES:
        least, most = _RANGES[field.type]
        return min(max(draw.choice(_SIZES), least), most)
    return draw.choice({field.TYPE_STRING: _TEXTS, field.TYPE_BOOL: (False, True)}.get(field.type, _FLOATS))


def case(number: int, models: dict[str, Any]) -> tuple[str, bytes]:
    """Return a method, and the bytes of its message."""
    mutator = Mutator(f"{SEED} rpc {number}")
    draw = mutator.random
    name = draw.choice(SERVED)
    message = draw.choice(_OTHERS)(name) if draw.random() < 0.1 else valid(mutator, models[name])
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        change(draw, message, all_fields=draw.random() < 0.3)
    data = message.SerializeToString()
    method = type(message).__name__.removesuffix("Request")
    return method, mutator.bytes_changed(data) if draw.random() < 0.15 else data


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
        with serving(directory, "--max-request-bytes", "100000") as server:
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
