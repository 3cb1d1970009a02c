"""Requests and answers of the protocol, from and to bytes; knows no server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.server.tensors import WITHOUT_JSON, Array, datatype_of, from_bytes, from_numbers, to_bytes
from aotexport_runtime.serving.interface import TensorSpec, TextSpec


class OfInput(Struct, forbid_unknown_fields=True):
    """Parameters of an input."""

    binary_data_size: int | None = None


class OfOutput(Struct, forbid_unknown_fields=True):
    """Parameters of an output that a request asks for."""

    binary_data: bool | None = None


class OfRequest(Struct, forbid_unknown_fields=True):
    """Parameters of a request; `timeout` in microseconds."""

    timeout: Annotated[int, Meta(gt=0, le=(1 << 63) - 1)] | None = None
    adapter: str | None = None
    binary_data_output: bool = False


class Tensor(Struct, forbid_unknown_fields=True):
    """An input of a request."""

    name: str
    datatype: str
    shape: list[int]
    parameters: OfInput | None = None
    data: msgspec.Raw = msgspec.Raw(b"null")


class Output(Struct, forbid_unknown_fields=True):
    """An output that a request asks for."""

    name: str
    parameters: OfOutput | None = None


class Head(Struct, forbid_unknown_fields=True):
    """A request: all of it, or what comes before its binary data; KServe's clients name the model once more."""

    inputs: list[Tensor]
    id: str | None = None
    parameters: OfRequest | None = None
    outputs: list[Output] | None = None
    model_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Inputs and outputs of a model as the protocol has them: datatype and shape by name, -1 where a size differs."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(
        cls, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], texts: Sequence[TextSpec] = ()
    ) -> Signature:
        """Return that of a servable, whose strings a request may lack; `NotSupported`: the protocol lacks a dtype."""
        takes, gives = ({s.name: (datatype_of(s.name, s.dtype), s.shape) for s in each} for each in (inputs, outputs))
        return cls(inputs=takes | {text.name: ("BYTES", (1,)) for text in texts}, outputs=gives)

    def described(self) -> dict[str, list[dict[str, Any]]]:
        """Return inputs and outputs as the metadata of a model have them."""
        return {
            kind: [{"name": name, "datatype": datatype, "shape": [*shape]} for name, (datatype, shape) in each.items()]
            for kind, each in (("inputs", self.inputs), ("outputs", self.outputs))
        }


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request with its tensors by name, and whether to answer in bytes by the name of each output that it asks for.

    `timeout_s` is how long the client waits; None: it does not say.
    """

    id: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, bool]
    timeout_s: float | None = None
    adapter: str | None = None


_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(Head).decode
_decode_values = msgspec.json.Decoder(list[Any]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_PIECE = 1 << 16
"""Values that are written at once, or characters that are read: a few milliseconds."""


def read_request(body: bytearray, json_nbytes: int | None, signature: Signature, request_id: str = "") -> Request:
    """Return the request in the body of an HTTP request.

    Args:
        body: JSON, and behind it binary data; owned by the request from here on.
        json_nbytes: length of the JSON; None: all of it.
        signature: of the model.
        request_id: used where the request has none.

    Raises:
        Refusal: the body is no request, or does not fit the signature.
    """
    view = memoryview(body)
    end = len(body) if json_nbytes is None else json_nbytes
    if not 0 <= end <= len(body):
        raise Refusal(f"the header tells of {end} bytes of JSON, and the body has {len(body)}")
    try:
        head = _decode(view[:end])
    except _MALFORMED as error:
        raise Refusal(f"the body is no inference request: {error}") from None
    inputs: dict[str, Array] = {}
    for index, tensor in enumerate(head.inputs):
        nbytes = None if tensor.parameters is None else tensor.parameters.binary_data_size
        check_input(tensor.name, tensor.datatype, tensor.shape, inputs, signature)
        is_given = memoryview(tensor.data) != b"null"
        if nbytes is None:
            if not is_given:
                raise Refusal(f"`{tensor.name}`: it has neither `data` nor `binary_data_size`")
            try:
                values = _values(tensor.data, len(tensor.shape))
            except _MALFORMED as error:
                raise Refusal(f"the body is no inference request: {error} - at `$.inputs[{index}].data`") from None
            inputs[tensor.name] = from_numbers(tensor.name, tensor.datatype, tensor.shape, values)
            continue
        if is_given:
            raise Refusal(f"`{tensor.name}`: it has both `data` and `binary_data_size`")
        if not 0 <= nbytes <= len(body) - end:
            raise Refusal(f"`{tensor.name}`: `binary_data_size` is {nbytes}, and {len(body) - end} bytes are left")
        inputs[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, view[end : end + nbytes])
        end += nbytes
    if end != len(body):
        raise Refusal(f"{len(body) - end} bytes of binary data belong to no input")
    parameters = head.parameters or OfRequest()
    return Request(
        id=head.id or request_id or str(uuid.uuid4()),
        inputs=inputs,
        outputs=_wanted(head.outputs, parameters.binary_data_output, signature),
        timeout_s=parameters.timeout and parameters.timeout / 1e6,
        adapter=parameters.adapter,
    )


def _values(data: msgspec.Raw, depth: int) -> list[Any]:
    """Return a list of JSON, whose lists are read in pieces as deep as `depth`: other threads run in between."""
    text = bytes(data)
    if len(text) <= _PIECE or text[:1] != b"[" or b'"' in text:
        return _decode_values(text)
    if text.find(b"[", 1) > 0:
        return [_values(items, depth - 1) for items in _decode_items(text)] if depth > 1 else _decode_values(text)
    values: list[Any] = []
    begin = 1
    while begin < len(text):
        end = text.find(b",", begin + _PIECE) % len(text)  # the last piece ends before the bracket
        values += _decode_values(b"[" + text[begin:end] + b"]")
        begin = end + 1
    return values


def check_input(name: str, datatype: str, shape: Sequence[int], known: Mapping[str, Any], signature: Signature) -> None:
    """Refuse an input that the model does not have so, or that came before (`Refusal`)."""
    if name in known:
        raise Refusal(f"`{name}` is given twice")
    if name not in signature.inputs:
        raise Refusal(f"`{name}`: no such input; there are {_names(signature.inputs)}")
    expected, sizes = signature.inputs[name]
    if datatype != expected:
        raise Refusal(f"`{name}`: expected {expected}, got {datatype}")
    if len(shape) != len(sizes) or any(want not in (-1, size) for want, size in zip(sizes, shape, strict=True)):
        raise Refusal(f"`{name}`: expected the shape {list(sizes)}, got {list(shape)}")


def _wanted(outputs: list[Output] | None, binary: bool, signature: Signature) -> dict[str, bool]:
    if not outputs:
        wanted = dict.fromkeys(signature.outputs, binary)
    else:
        given = {each.name: None if each.parameters is None else each.parameters.binary_data for each in outputs}
        wanted = {name: binary if in_bytes is None else in_bytes for name, in_bytes in given.items()}
    check_outputs(wanted, signature)
    for name, in_bytes in wanted.items():
        if not in_bytes and signature.outputs[name][0] in WITHOUT_JSON:
            raise Refusal(f"`{name}`: {signature.outputs[name][0]} has no form in JSON; ask for it as binary data")
    return wanted


def check_outputs(names: Mapping[str, Any], signature: Signature) -> None:
    """Refuse names that are no outputs (`Refusal`)."""
    for name in names:
        if name not in signature.outputs:
            raise Refusal(f"`{name}`: no such output; there are {_names(signature.outputs)}")


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def write_answer(
    request: Request, model: str, version: str, outputs: Mapping[str, Array], signature: Signature
) -> tuple[bytes, int | None]:
    """Return the body of an HTTP response with a servable's outputs, and how much of it is JSON; None: all."""
    entries: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for name, in_bytes in request.outputs.items():
        entries.append(_entry(name, signature.outputs[name][0], outputs[name], parts if in_bytes else None))
    answer = {"model_name": model, "model_version": version, "id": request.id, "outputs": entries}
    head = msgspec.json.encode(answer)
    return (head, None) if not parts else (b"".join([head, *parts]), len(head))


def write_call(inputs: Mapping[str, Array], signature: Signature) -> tuple[bytes, int]:
    """Return the body of a request for `inputs` in bytes, and how much of it is JSON."""
    parts: list[bytes | memoryview] = []
    entries = [_entry(name, signature.inputs[name][0], array, parts) for name, array in inputs.items()]
    head = msgspec.json.encode({"inputs": entries})
    return b"".join([head, *parts]), len(head)


def _entry(name: str, datatype: str, array: Array, parts: list[bytes | memoryview] | None) -> dict[str, Any]:
    """Return what JSON says of a tensor; append its bytes to `parts`, if there are any."""
    entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
    if parts is None:
        entry["data"] = _json_of(array)
    else:
        parts.append(to_bytes(datatype, array))
        entry["parameters"] = {"binary_data_size": len(parts[-1])}
    return entry


def _json_of(array: Array) -> msgspec.Raw:
    """Return the values of a tensor as a list of JSON, made in pieces: other threads run in between."""
    flat = array.ravel()
    pieces = (flat[begin : begin + _PIECE].tolist() for begin in range(0, flat.size, _PIECE))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces) + b"]")
