"""gRPC methods that KServe's service lacks: Triton's streams of requests and its index, and gRPC's check of health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import msgspec
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from aotexport_runtime.server.endpoints.account import Asked
from aotexport_runtime.server.endpoints.generation import Texts, names_of_texts
from aotexport_runtime.server.endpoints.plane import BundlePlane
from aotexport_runtime.server.openai import Completion
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import Refusal, refusal_of
from aotexport_runtime.server.tensors import from_bytes

_SERVICE = "inference.GRPCInferenceService"
_AHEAD = 64
"""How many requests of a stream may wait for their answers to be sent."""
_LOOK_S = 1.0


class MoreMethods:
    """The methods, which take and return the bytes of messages."""

    def __init__(self, plane: BundlePlane, options: ServeOptions, infer: Any) -> None:
        """Take the plane, and KServe's method `ModelInfer`."""
        self._plane, self._options, self._infer = plane, options, infer

    def handlers(self) -> list[Any]:
        """Return the handlers of the methods, by service."""
        index = grpc.unary_unary_rpc_method_handler(self.index, request_deserializer=bytes)
        check = grpc.unary_unary_rpc_method_handler(self.check, request_deserializer=bytes)
        more = {"RepositoryIndex": index, "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.stream)}
        health = {"Check": check, "Watch": grpc.unary_stream_rpc_method_handler(self.watch)}
        of = grpc.method_handlers_generic_handler
        return [of(_SERVICE, more), of("grpc.health.v1.Health", health)]

    async def check(self, data: bytes, context: Any) -> bytes:
        """Return whether the server is ready (1 of the field `status`), or not (2)."""
        service = bytes(_fields(data).get(1, b"")).decode(errors="replace")
        if service not in ("", _SERVICE):
            raise Refusal(f"there is no service `{service[:100]}`", "not_found")
        return b"\x08\x02" if self._plane.unready else b"\x08\x01"

    async def watch(self, data: bytes, context: Any) -> None:
        """Tell whether the server is ready whenever that changes."""
        last = b""
        while True:
            if (found := await self.check(b"", context)) != last:
                await context.write(last := found)
            await asyncio.sleep(_LOOK_S)

    async def index(self, data: bytes, context: Any) -> bytes:
        """Return every model with its state."""
        entries = await self._plane.index(bool(_fields(data).get(2)))
        names = ("name", "version", "state", "reason")
        texts = [b"".join(_field(at, each[name].encode()) for at, name in enumerate(names, 1)) for each in entries]
        return b"".join(_field(1, text) for text in texts)

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        """Answer the requests of a stream side by side, in their order, and texts piece by piece."""
        waiting: asyncio.Queue[asyncio.Queue[bytes | None] | None] = asyncio.Queue(_AHEAD)

        async def read(group: asyncio.TaskGroup) -> None:
            async for data in messages:
                answers: asyncio.Queue[bytes | None] = asyncio.Queue()
                await waiting.put(answers)
                group.create_task(self._answer(data, context, answers))
            await waiting.put(None)

        async with asyncio.TaskGroup() as group:
            group.create_task(read(group))
            while (answers := await waiting.get()) is not None:
                while (answer := await answers.get()) is not None:
                    await context.write(answer)

    async def _answer(self, data: bytes, context: Any, answers: asyncio.Queue[bytes | None]) -> None:
        """Put what answers a request, each a `ModelStreamInferResponse`, and None at the end."""
        request = pb.ModelInferRequest()
        try:
            request.ParseFromString(data)
            if request.model_name in names_of_texts(self._plane):
                async with contextlib.aclosing(self._pieces(request, context)) as pieces:
                    async for piece in pieces:
                        answers.put_nowait(_field(2, piece.SerializeToString()))
            else:
                answers.put_nowait(_field(2, (await self._infer(request, context)).SerializeToString()))
        except DecodeError:
            answers.put_nowait(_field(1, b"the bytes are no message of the method"))
        except Exception as error:  # noqa: BLE001 - answered to the client
            answer = pb.ModelInferResponse(id=request.id, model_name=request.model_name).SerializeToString()
            answers.put_nowait(_field(1, str(refusal_of(error)).encode()) + _field(2, answer))
        answers.put_nowait(None)

    async def _pieces(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Yield the pieces of a text; the parameter `triton_final_response` marks the last."""
        parent = dict(context.invocation_metadata() or ()).get("traceparent", "")
        asked = Asked(model=request.model_name, protocol="grpc", id=request.id, traceparent=parent)
        async with self._plane.accounted(asked):
            texts = Texts(self._plane, self._options, asked, _completion(request))
            async with contextlib.aclosing(texts.pieces()) as pieces:
                async for piece in pieces:
                    output = pb.ModelInferResponse.InferOutputTensor(name="text_output", datatype="BYTES", shape=[1])
                    yield pb.ModelInferResponse(
                        model_name=request.model_name,
                        model_version=asked.served.version if asked.served else "",
                        id=request.id,
                        parameters={"triton_final_response": pb.InferParameter(bool_param=bool(piece.finish))},
                        outputs=[output],
                        raw_output_contents=[len(text := piece.text.encode()).to_bytes(4, "little") + text],
                    )


def _completion(request: Any) -> Completion:
    """Return what a request with the inputs of Triton's vLLM backend asks for; `Refusal`: it is none."""
    if request.parameters or len(request.raw_input_contents) not in (0, len(request.inputs)):
        raise Refusal("a request for text has inputs of BYTES: `text_input`, `sampling_parameters`; no parameters")
    found: dict[str, str] = {}
    for index, tensor in enumerate(request.inputs):
        data = request.raw_input_contents[index] if request.raw_input_contents else _packed(tensor)
        if tensor.name not in ("text_input", "sampling_parameters") or tensor.datatype != "BYTES":
            raise Refusal(f"`{tensor.name[:100]}`: expected `text_input` or `sampling_parameters`, of BYTES")
        found[tensor.name] = str(from_bytes(tensor.name, "BYTES", [1], data)[0])
    try:
        options = msgspec.json.decode(found.get("sampling_parameters", "{}"), type=dict[str, Any])
        given = {**options, "model": request.model_name, "prompt": found.get("text_input"), "stream": True}
        return msgspec.convert(given, Completion, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refusal(f"`sampling_parameters` are the fields of a completion, as JSON: {error}") from None


def _packed(tensor: Any) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in tensor.contents.bytes_contents)


def _fields(data: bytes) -> dict[int, Any]:
    """Return the fields of a message by number."""
    return {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(data))}


def _field(number: int, data: bytes) -> bytes:
    """Return a field of bytes as a message has it."""
    size, head = len(data), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + data
