"""Requests of the Open Inference Protocol, for `tests.fuzz.readers`: valid ones, and what becomes of any.

Each is read or refused by a sentence; what was read fits the signature, and is the same when it is sent back.
"""

import json
from typing import Any

import numpy as np

from aotexport_runtime.server.messages import Request, Signature, read_request, write_answer
from aotexport_runtime.server.refusals import Refusal
from tests.fuzz.mutations import Mutator

_SHAPES = {
    "float": ("FP32", (-1, 2)),
    "double": ("FP64", (2, -1)),
    "half": ("FP16", (-1,)),
    "brain": ("BF16", (-1, -1)),
    "flags": ("BOOL", (3,)),
    "scalar": ("INT64", ()),
    "bytes": ("UINT8", (-1,)),
    "small": ("INT8", (1, -1, 1)),
}
SIGNATURE = Signature(inputs=_SHAPES, outputs=_SHAPES)
_VALUES = {
    "float": np.array([[1.5, -2], [0, 3]], np.float32),
    "double": np.array([[0.1], [1e300]]),
    "half": np.array([1.5, 2], np.float16),
    "brain": np.array([[1.5, -2]], np.float32),
    "flags": np.array([True, False, True]),
    "scalar": np.array(-7),
    "bytes": np.array([0, 255], np.uint8),
    "small": np.array([[[-128], [127]]], np.int8),
}
_IN_JSON = [name for name, (datatype, _) in _SHAPES.items() if datatype not in ("FP16", "BF16")]


def valid(mutator: Mutator) -> tuple[dict[str, Any], bytes]:
    """Return a valid request: the document, and binary data."""
    draw = mutator.random
    names = draw.sample(sorted(_SHAPES), draw.randrange(1, len(_SHAPES) + 1))
    outputs = {name: name not in _IN_JSON or draw.random() < 0.5 for name in names}
    asked = Request(id="x", inputs={}, outputs=outputs)
    body, length = write_answer(asked, "model", "1", _VALUES, SIGNATURE)
    answer = json.loads(body[:length])
    document: dict[str, Any] = {"inputs": answer["outputs"]}
    if draw.random() < 0.5:
        document["parameters"] = {"timeout": 1000, "binary_data_output": True}
    else:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in names]
    return document, body[length:] if length is not None else b""


def outcome(body: bytearray, json_nbytes: int | None) -> str:
    """Return what became of a request: `read`, the kind of its refusal, or what is wrong, which begins with `!`."""
    try:
        request = read_request(body, json_nbytes, SIGNATURE)
    except Refusal as refusal:
        return refusal.kind
    except Exception as error:
        return f"!{type(error).__name__}: {str(error)[:80]}"
    for name, array in request.inputs.items():
        datatype, sizes = _SHAPES[name]
        if datatype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
            return f"!`{name}` holds a byte that is no BOOL"
        if array.ndim != len(sizes) or array.dtype != _VALUES[name].dtype:
            return f"!`{name}` is {array.dtype} of {array.ndim} axes, not {datatype}{list(sizes)}"
    sent = Request(id="x", inputs={}, outputs=dict.fromkeys(request.inputs, True))
    answer, length = write_answer(sent, "model", "1", request.inputs, SIGNATURE)
    inputs = json.loads(answer[:length])["outputs"]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    again = read_request(bytearray(head + (answer[length:] if length else b"")), len(head), SIGNATURE)
    for name, array in request.inputs.items():
        if again.inputs[name].tobytes() != array.tobytes() or again.inputs[name].shape != array.shape:
            return f"!`{name}` is another when it is sent back"
    return "read"
