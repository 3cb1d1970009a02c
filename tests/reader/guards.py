"""Section 8.4: the calls that a program serves."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.reader.trees import must
from tests.reader.values import dtype, size


def check(program: dict[str, Any], inputs: Sequence[Any]) -> dict[str, int]:
    """Return the program's symbols.

    Raises:
        CallRefused: a hard guard fails.
    """
    specs = program["inputs"]
    for spec, value in zip(specs, inputs, strict=True):
        if spec["kind"] == "argument":
            _tensor(spec, value)
        if spec["kind"] == "size":
            must(type(value) is int, f"{spec['path']}: no integer")
    symbols: dict[str, int] = {}
    for each in program.get("dimensions", []):
        source = inputs[each["input_index"]]
        read = source.shape[each["axis"]] if isinstance(source, torch.Tensor) else source
        # A rest is refused below: the axis has not the size of `meta`.
        symbol = (read - each.get("offset", 0)) // each.get("factor", 1)
        must(symbol >= (-math.inf if each["min"] is None else each["min"]), f"{each['name']}: too small")
        must(symbol <= (math.inf if each.get("max") is None else each["max"]), f"{each['name']}: too large")
        symbols[each["symbol"]] = symbol
    must(all(size(each, symbols) for each in program.get("guards", [])), "a guard")
    for spec, value in zip(specs, inputs, strict=True):
        if spec["kind"] == "argument":
            shape = [size(each, symbols) for each in spec["meta"]["shape"]]
            must(list(value.shape) == shape, f"{spec['path']}: other sizes")
    _facts(program, inputs, symbols)
    _gradients(program, inputs)
    return symbols


def _tensor(spec: dict[str, Any], value: Any) -> None:
    path, meta = spec["path"], spec["meta"]
    must(isinstance(value, torch.Tensor), f"{path}: no tensor")
    must(value.dtype == dtype(meta["dtype"]), f"{path}: another dtype")
    must(value.dim() == len(meta["shape"]), f"{path}: another rank")
    must(value.device.type == meta.get("device", "cpu"), f"{path}: another device")
    must(value.layout == torch.strided, f"{path}: another layout")


def _facts(program: dict[str, Any], inputs: Sequence[Any], symbols: dict[str, int]) -> None:
    """Compare the facts of `fixed` (8.12)."""
    fixed = program.get("fixed", [])
    arguments = [(spec, t) for spec, t in zip(program["inputs"], inputs, strict=True) if spec["kind"] == "argument"]
    for spec, tensor in arguments:
        meta = spec["meta"]
        steps = zip(tensor.stride(), meta["stride"], tensor.shape, strict=True)
        strides = all(step == size(said, symbols) for step, said, count in steps if count > 1)
        offset = tensor.storage_offset() == size(meta.get("offset", 0), symbols)
        must("layout" not in fixed or strides, "strides")
        must("layout" not in fixed or offset, "offset")
        must("requires_grad" not in fixed or tensor.requires_grad == meta.get("requires_grad", False), "requires_grad")
        must("is_leaf" not in fixed or tensor.is_leaf == spec.get("is_leaf", True), "is_leaf")
    distinct = len({id(tensor) for _, tensor in arguments}) == len(arguments)
    must("identity" not in fixed or distinct, "identity")
    must("grad_mode" not in fixed or torch.is_grad_enabled() == program["grad"], "grad mode")
    must("inference_mode" not in fixed or not torch.is_inference_mode_enabled(), "inference mode")
    cast = str(torch.get_autocast_dtype("cpu")).partition(".")[2] if torch.is_autocast_enabled("cpu") else None
    must("autocast" not in fixed or cast == program.get("autocast"), "autocast")


def _gradients(program: dict[str, Any], inputs: Sequence[Any]) -> None:
    """Compare what the model's gradients, and its questions after them, depend on."""
    for index in program.get("differentiated", []):
        tensor, meta = inputs[index], program["inputs"][index]["meta"]
        must(not tensor._backward_hooks, "hooks")
        must(not tensor.retains_grad, "a retained gradient")
        must(tensor.requires_grad or not meta.get("requires_grad", False), "an input to differentiate")
    for each in program.get("questions", []):
        answer = any(inputs[index].requires_grad for index in each["inputs"])
        recorded = torch.is_grad_enabled() or not each.get("recording", False)
        must(answer == each["requires_grad"] or not recorded, "a question")
