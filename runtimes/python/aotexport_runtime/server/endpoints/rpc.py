"""gRPC: KServe's service, with tensors read and written without detours, and the codes of the protocol."""

from __future__ import annotations

import importlib.util
import uuid
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as service
from kserve.protocol.grpc.servicer import InferenceServicer

from aotexport_runtime.server.endpoints.plane import BundlePlane, Hold, coded
from aotexport_runtime.server.endpoints.triton import MoreMethods
from aotexport_runtime.server.messages import (
    OfInput,
    OfOutput,
    OfRequest,
    Request,
    Signature,
    check_input,
    check_outputs,
)
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import CODES, Refusal, refusal_of
from aotexport_runtime.server.repository import Served
from aotexport_runtime.server.tensors import Array, from_bytes, from_numbers, to_bytes
from aotexport_runtime.serving.batcher import Answer

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Service(InferenceServicer):
    """KServe's service over the models of a data plane."""

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 (KServe's name)
        """Return whether a model, or the version that is asked for, is served."""
        ready = await self._data_plane.model_ready(request.name)
        if request.version:
            self._data_plane.repository.current(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802 (KServe's name)
        return pb.ModelMetadataResponse(**await self._data_plane.model_metadata(request.name, request.version))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802 (KServe's name)
        self._data_plane.check_admin(_header(context, "authorization"))
        return await super().RepositoryModelLoad(_named(request), context)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802 (KServe's name)
        self._data_plane.check_admin(_header(context, "authorization"))
        return await super().RepositoryModelUnload(_named(request), context)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 (KServe's name)
        remaining = context.time_remaining()

        async def read(signature: Signature, hold: Hold) -> Request:
            hold(nbytes := request.ByteSize())
            return await coded(nbytes, read_grpc, request, signature, remaining)

        def write(asked: Request, served: Served, answer: Answer) -> Any:
            return write_grpc(asked, request.model_name, served, answer.result())

        parent = _header(context, "traceparent")
        return await self._data_plane.answer("grpc", request.model_name, request.model_version, read, write, parent)


def _header(context: Any, name: str) -> Any:
    return dict(context.invocation_metadata() or ()).get(name, "")


def _named(message: Any) -> Any:
    """Return a message about a model with its name, which is the first field of KServe's, the second of Triton's."""
    triton = [field.data for field in UnknownFieldSet(message) if field.field_number == 2]
    if triton and not message.model_name:
        message.model_name = triton[-1].decode(errors="replace")
    return message


def read_grpc(message: Any, signature: Signature, remaining_s: float | None) -> Request:
    """Return the request in a `ModelInferRequest`, whose client waits for `remaining_s`; None: it does not say.

    Raises:
        Refusal: the message is no request, or does not fit the signature.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise Refusal(f"there are {len(message.inputs)} inputs, and raw contents of {len(raw)}")
    inputs: dict[str, Any] = {}
    for index, tensor in enumerate(message.inputs):
        shape = [*tensor.shape]
        check_input(tensor.name, tensor.datatype, shape, inputs, signature)
        _parameters(tensor, OfInput)
        if raw and tensor.HasField("contents"):
            raise Refusal(f"`{tensor.name}`: it has both contents and raw contents")
        if raw:
            inputs[tensor.name] = from_bytes(tensor.name, tensor.datatype, shape, raw[index])
        else:
            field = _CONTENTS.get(tensor.datatype)
            numbers = [*getattr(tensor.contents, field)] if field else []
            inputs[tensor.name] = from_numbers(tensor.name, tensor.datatype, shape, numbers)
    outputs = dict.fromkeys((output.name for output in message.outputs) if message.outputs else signature.outputs, True)
    check_outputs(outputs, signature)
    for output in message.outputs:
        _parameters(output, OfOutput)
    parameters = _parameters(message, OfRequest)
    waits = [wait for wait in (remaining_s, parameters.timeout and parameters.timeout / 1e6) if wait is not None]
    return Request(
        id=message.id or str(uuid.uuid4()),
        inputs=inputs,
        outputs=outputs,
        timeout_s=min(waits, default=None),
        adapter=parameters.adapter,
    )


def _parameters(message: Any, kind: Any) -> Any:
    """Return the parameters of a message as a record; one of a type that KServe's protocol lacks is of none."""
    if not message.parameters:
        return kind()
    given = {
        name: getattr(each, each.WhichOneof("parameter_choice") or "", ...) for name, each in message.parameters.items()
    }
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise Refusal(f"the parameters of a request, input or output: {error}") from None


def write_grpc(request: Request, model: str, served: Served, outputs: dict[str, Array]) -> Any:
    """Return the message that answers a request: `ModelInferResponse`, its tensors raw."""
    arrays = {name: (served.signature.outputs[name][0], outputs[name]) for name in request.outputs}
    return pb.ModelInferResponse(
        model_name=model,
        model_version=served.version,
        id=request.id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=array.shape)
            for name, (datatype, array) in arrays.items()
        ],
        raw_output_contents=[bytes(to_bytes(datatype, array)) for datatype, array in arrays.values()],
    )


class Codes(aio.ServerInterceptor):
    """Gives errors their codes."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Return the handler of a method, with its errors as statuses."""
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        answer = handler.unary_unary

        async def answer_or_abort(data: bytes, context: Any) -> Any:
            try:
                return await answer(handler.request_deserializer(data), context)
            except DecodeError:  # gRPC itself has no code for it
                refusal = Refusal("the bytes are no message of the method")
            except Exception as error:  # noqa: BLE001 - answered to the client
                refusal = refusal_of(error)
            await context.abort(getattr(grpc.StatusCode, CODES[refusal.kind][1]), str(refusal))

        return grpc.unary_unary_rpc_method_handler(answer_or_abort, response_serializer=handler.response_serializer)


_FRAME_NBYTES = 1 << 16
"""Of a message, beside its tensors."""


async def start_grpc(plane: BundlePlane, options: ServeOptions, port: int) -> aio.Server:
    """Return a server that answers at a port that other workers answer at as well."""
    server = aio.server(
        interceptors=[Codes()],
        maximum_concurrent_rpcs=options.max_connections,
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", options.max_request_bytes + _FRAME_NBYTES),
            ("grpc.max_send_message_length", -1),
        ],
    )
    own = Service(plane, plane)
    service.add_GRPCInferenceServiceServicer_to_server(own, server)
    server.add_generic_rpc_handlers(MoreMethods(plane, options, own.ModelInfer).handlers())
    if importlib.util.find_spec("grpc_reflection") is not None:
        from grpc_reflection.v1alpha import reflection

        names = [each.full_name for each in pb.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    address = f"{options.host}:{port}"
    if options.tls_cert and options.tls_key:
        pair = (options.tls_key.read_bytes(), options.tls_cert.read_bytes())
        server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(address)
    await server.start()
    return server
