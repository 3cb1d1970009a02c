"""`python -m tests.fuzz.requests --cases N`: read mutated requests of the Open Inference Protocol.

Each is read or refused by a sentence; what was read fits the signature, and is the same when it is sent back. A case is
drawn from the seed and its number, as in `tests.fuzz.bundles`, whose bounds on memory and time hold here too.
"""

import argparse
import collections
import json
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from aotexport_runtime.server.messages import Request, Signature, read_request, write_answer
from aotexport_runtime.server.refusals import Refusal
from tests.fuzz.bundles import CASE_S, MOST_NBYTES, SEED
from tests.fuzz.mutations import Mutator

RESULTS = Path(__file__).parent / "results" / "requests.json"
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


def _base(mutator: Mutator) -> tuple[dict[str, Any], bytes]:
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


def case(number: int) -> tuple[bytearray, int | None]:
    """Return a request: its body, and how much of it the header says is JSON."""
    mutator = Mutator(f"{SEED} request {number}")
    draw = mutator.random
    document, data = _base(mutator)
    head = json.dumps(document).encode()
    if draw.random() < 0.8:
        head = mutator.json_changed(head)
    if draw.random() < 0.15:
        head = mutator.bytes_changed(head)
    if data and draw.random() < 0.1:
        data = mutator.bytes_changed(data)
    length = draw.choice((0, len(head) - 1, len(head) + 1, 1 << 40, -1)) if draw.random() < 0.05 else len(head)
    return bytearray(head + data), length if data or draw.random() < 0.5 else None


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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.requests", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="cases of the whole record, with those of it")
    options = parser.parse_args()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_NBYTES, MOST_NBYTES))
    record = {"seed": SEED, "numpy": np.__version__, "next": 0, "requests": {}, "wrong": []}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text())
    found = collections.Counter[str](record["requests"])
    for number in range(record["next"], options.cases):
        # The process ends by the signal if a case takes longer; the record then says where to look.
        signal.setitimer(signal.ITIMER_PROF, CASE_S)
        result = outcome(*case(number))
        found["wrong" if result.startswith("!") else result] += 1
        if result.startswith("!"):
            record["wrong"].append([number, result])
            print(number, result, flush=True)
        if number % 10_000 == 9_999 or number == options.cases - 1:
            record |= {"next": number + 1, "requests": dict(found.most_common())}
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
