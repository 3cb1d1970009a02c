"""Values of symbolic sizes in an FX graph under construction."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.builtins import SIZE_OPERATORS
from aotexport.lower.onnx.form import Call
from aotexport_runtime.schema.program import Program, SizeInput
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import SizeMeta, TensorMeta, ValueMeta


class Symbols:
    """Values of the symbols of a graph or subgraph."""

    def __init__(self, call: Call) -> None:
        """Begin without symbols; `call` adds a call to the graph."""
        self._call = call
        self._values: dict[str, Any] = {}

    def bind_dimensions(self, program: Program, inputs: Sequence[Any]) -> None:
        """Make the values of the program's symbols from its inputs, in order."""
        for dimension in program.dimensions:
            value = inputs[dimension.input_index]
            if not isinstance(program.inputs[dimension.input_index], SizeInput):
                value = self._call(torch.ops.aten.sym_size.int, value, dimension.axis)
            if dimension.offset:
                value = self._call(operator.sub, value, dimension.offset)
            if dimension.factor != 1:
                value = self._call(operator.floordiv, value, dimension.factor)
            self._values[dimension.symbol] = value

    def bind_operand(self, value: Any, meta: ValueMeta) -> None:
        """Take values of sizes that a subgraph reads from its operand."""
        if isinstance(meta, SizeMeta) and isinstance(meta.value, str):
            self._values[meta.value] = value
        for axis, size in enumerate(meta.shape if isinstance(meta, TensorMeta) else ()):
            if isinstance(size, str) and size not in self._values:
                self._values[size] = self._call(torch.ops.aten.sym_size.int, value, axis)

    def value(self, size: Size | float) -> Any:
        """Return the value of a size.

        Raises:
            ExportFailed: ONNX cannot compute it.
        """
        if isinstance(size, int | float):
            return size
        if isinstance(size, str):
            if size not in self._values:
                raise ExportFailed(
                    "a branch or loop body reads a dynamic size of none of its operands, which has no translation to "
                    "ONNX. Pass it in as an operand"
                )
            return self._values[size]
        if size.op not in SIZE_OPERATORS:
            raise ExportFailed(f"a size is computed by `{size.op}`, which has no translation to ONNX")
        operands = [self.value(operand) for operand in size.args]
        function, value = SIZE_OPERATORS[size.op], operands[0]
        for operand in operands[1:]:
            value = self._call(function, value, operand)
        return value
