"""Dropout of ONNX models of training steps: random numbers that a seed and the number of steps determine.

Number `i` of draw `d` of step `c` is `mix(mix(mix(mix(seed) + c) + d) + i * GAMMA) >> 40` by 2**-24, where `mix` is the
function of SplitMix64, all on 64 bits. ONNX's own operators draw from the state of a session.

Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014, figures 14 and 17.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18
from torch.utils._python_dispatch import TorchDispatchMode

from aotexport_runtime.commands.onnx_calls import FlatCall
from aotexport_runtime.module.optimizer import COUNT, SEED
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput

aten = torch.ops.aten
op: Any = opset18
GAMMA, FACTORS = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LIBRARY = torch.library.Library("aotexport_onnx", "DEF")
_LIBRARY.define("uniform(Tensor seed, Tensor count, int draw, SymInt[] size) -> Tensor")


def _uniform(seed: torch.Tensor, count: torch.Tensor, draw: int, size: Sequence[int]) -> torch.Tensor:
    """Return random numbers in [0, 1) by their definition."""

    def mix(z: Any) -> Any:
        for by, factor in FACTORS:
            z = (z ^ (z >> np.uint64(by))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))

    key = mix(seed.numpy().astype(np.uint64).reshape(1))
    for further in (int(count), draw):
        key = mix(key + np.uint64(further))
    found = mix(key + np.arange(math.prod(size), dtype=np.uint64) * np.uint64(GAMMA)) >> np.uint64(40)
    return torch.from_numpy((found.astype(np.float32) * np.float32(2**-24)).reshape(size))


def _translated(seed: Any, count: Any, draw: int, size: Any) -> Any:
    """Return the same in operators of ONNX."""
    wide = ir.DataType.UINT64

    def number(value: int) -> Any:
        return op.Constant(value=ir.tensor(np.array(value, np.uint64)))

    def mix(z: Any) -> Any:
        for by, factor in FACTORS:
            z = op.Mul(op.BitwiseXor(z, op.BitShift(z, number(by), direction="RIGHT")), number(factor))
        return op.BitwiseXor(z, op.BitShift(z, number(31), direction="RIGHT"))

    key = mix(op.Add(mix(op.Cast(seed, to=wide)), op.Cast(op.Cast(count, to=ir.DataType.INT64), to=wide)))
    key = mix(op.Add(key, number(draw)))
    zero, one = (op.Constant(value=ir.tensor(np.array(each, np.int64))) for each in (0, 1))
    places = op.Cast(op.Range(zero, op.ReduceProd(size, keepdims=False), one), to=wide)
    found = op.BitShift(mix(op.Add(key, op.Mul(places, number(GAMMA)))), number(40), direction="RIGHT")
    scale = op.Constant(value=ir.tensor(np.array(2**-24, np.float32)))
    return op.Reshape(op.Mul(op.Cast(found, to=ir.DataType.FLOAT), scale), size)


_LIBRARY.impl("uniform", _uniform, "CPU")
_LIBRARY.impl("uniform", lambda seed, count, draw, size: torch.empty(size, device=seed.device), "Meta")
TRANSLATIONS = {torch.ops.aotexport_onnx.uniform.default: _translated}
DROPOUT = aten.native_dropout.default


class Draws:
    """The random numbers of a call of a training step, one draw after another."""

    def __init__(self, seed: torch.Tensor, count: torch.Tensor) -> None:
        """Begin a call; tensors of rank 0, borrowed."""
        self._seed, self._count, self._made = seed, count.clone(), 0

    def dropout(self, value: torch.Tensor, p: float, train: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `native_dropout` does, with these numbers."""
        draw = torch.ops.aotexport_onnx.uniform.default(self._seed, self._count, self._made, value.shape)
        self._made += 1
        kept = aten.ge.Scalar(draw, p)
        scaled = aten.mul.Scalar(value, 0.0 if p == 1 else 1 / (1 - p))
        return aten.mul.Tensor(scaled, aten._to_copy.default(kept, dtype=value.dtype)), kept


def draws_of(program: Program, inputs: Sequence[Any]) -> Draws | None:
    """Return the random numbers of a call with these values of the program's inputs; None: nothing determines any."""
    found = {
        spec.path: value
        for spec, value in zip(program.inputs, inputs, strict=True)
        if isinstance(spec, ArgumentInput) and spec.path in (SEED, COUNT)
    }
    return Draws(found[SEED], found[COUNT]) if SEED in found else None


def drawing(program: Program, call: FlatCall) -> FlatCall:
    """Return a call of a program whose dropout draws what that of its ONNX model does."""
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]

    def drawn(values: list[Any]) -> list[tuple[str, Any]]:
        with _Drawing(Draws(values[paths.index(SEED)], values[paths.index(COUNT)])):
            return call(values)

    return drawn if SEED in paths else call


class _Drawing(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.bernoulli_.float:  # The runtime's own dropout.
            return args[0].copy_(self._draws.dropout(args[0].float(), 1 - (*args, 0.5)[1])[1])
        return self._draws.dropout(*args) if func is DROPOUT else func(*args, **(kwargs or {}))
