"""The fast way through a call by ONNX Runtime: generated functions for arrays, and for tensors, that need no care.

Invariant: what they serve, signature and guards admit, and `OnnxPlan.run` would give the session the same values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotexport_runtime.call.signature import Signature
from aotexport_runtime.call.straight_line import Call, Writer, input_name, serves
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program


@dataclass(frozen=True, kw_only=True)
class Way:
    """What the fast way passes, and where it leads.

    Attributes:
        program: its record.
        model: its entry in the manifest.
        signature: binds calls.
        session: an open `onnxruntime.InferenceSession`.
        unflatten: puts the program's outputs into the structure that the call returns.
        otherwise: takes the calls that are turned away.
    """

    program: Program
    model: OnnxModel
    signature: Signature
    session: Any
    unflatten: Callable[[Any], Any]
    otherwise: Call


def fast_way(way: Way) -> Call:
    """Return what takes every call of a program: the fast way, or the other where the program has none."""
    leaves, keywords = way.signature.plain_leaves, way.signature.plain_keywords
    passed = [] if leaves is None else [leaves]
    passed += [] if keywords is None else [list(keywords.values())]
    if not passed or not all(serves(way.program, indices) for indices in passed) or not _is_plain(way):
        return way.otherwise
    with_tensors: list[Call] = []

    def without_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not with_tensors:
            if "torch" not in sys.modules:
                return way.otherwise(args, kwargs)
            with_tensors.append(_generated(way, _check_tensor, "{}.numpy()", _from_numpy(), way.otherwise))
        return with_tensors[0](args, kwargs)

    return _generated(way, _check_array, "{}", np.asarray, without_arrays)


def _is_plain(way: Way) -> bool:
    """Return whether values go in and out of the model as they are, and it changes and checks nothing."""
    model, program = way.model, way.program
    if model.updates or model.checks or model.state_inputs or program.rebinds:
        return False
    metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
    metas += [meta for meta in program.outputs if meta is not None]
    return None not in program.outputs and all(_is_common(meta.dtype) for meta in metas)


def _is_common(dtype: str) -> bool:
    """Return whether numpy has a dtype, and ONNX."""
    return dtype == "bool" or dtype.startswith(("int", "uint")) or dtype in ("float16", "float32", "float64")


def _generated(
    way: Way,
    check: Callable[[Writer, str, str], None],
    array: str,
    convert: Callable[[Any], Any],
    otherwise: Call,
) -> Call:
    """Return a function for calls with tensors of one kind.

    Args:
        way: see there.
        check: writes what turns away other values than contiguous tensors of a dtype in a variable.
        array: source of a tensor's array.
        convert: makes the caller's kind of tensor of an array.
        otherwise: takes the calls that are turned away.
    """
    program, writer = way.program, Writer()
    writer.bind(way.signature.plain_leaves, way.signature.plain_keywords)
    metas = {index: spec.meta for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)}
    arguments = list(metas)
    for index, meta in metas.items():
        check(writer, meta.dtype, input_name(index))
        writer.refuse_if(f"{input_name(index)}.ndim != {len(meta.shape)}")
    writer.check_sizes(program, arguments)
    writer.guarded()
    feeds = ", ".join(
        f"{writer.constant(name)}: {array.format(input_name(index))}"
        for name, index in zip(way.model.inputs, arguments, strict=True)
    )
    run, outputs = writer.constant(way.session.run), writer.constant(list(way.model.outputs))
    returned, converted = writer.constant(way.unflatten), writer.constant(convert)
    writer.lines.append(f"return {returned}([{converted}(y) for y in {run}({outputs}, {{{feeds}}})])")
    return writer.function(otherwise, f"{program.name} ONNX call")


def _check_array(writer: Writer, dtype: str, value: str) -> None:
    writer.refuse_if(f"type({value}) is not {writer.constant(np.ndarray)}")
    writer.refuse_if(f"{value}.dtype is not {writer.constant(np.dtype(dtype))} or not {value}.flags.c_contiguous")


def _check_tensor(writer: Writer, dtype: str, value: str) -> None:
    import torch

    writer.refuse_if(f"type({value}) is not {writer.constant(torch.Tensor)}")
    writer.refuse_if(f"{value}.dtype is not {writer.constant(getattr(torch, dtype))} or not {value}.is_cpu")
    writer.refuse_if(f"{value}.layout is not {writer.constant(torch.strided)} or not {value}.is_contiguous()")
    writer.refuse_if(f"{value}.requires_grad or {value}.is_neg()")


def _from_numpy() -> Callable[[Any], Any]:
    import torch

    return torch.from_numpy
