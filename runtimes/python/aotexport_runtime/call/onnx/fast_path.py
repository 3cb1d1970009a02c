"""The fast path of a call by ONNX Runtime: generated functions for plain arrays, and for plain tensors.

Invariant: a call that they serve is admitted by the explaining path as well, and `OnnxPlan.run` gives the session the
same values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotexport_runtime.guards.kinds import ARRAYS, Kind, torch_tensors
from aotexport_runtime.guards.quick_path import Call, bind, quick_path
from aotexport_runtime.guards.rule import GuardSource, Row, input_name
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput


@dataclass(frozen=True, kw_only=True)
class OnnxFastPath:
    """The guards of a fast path, and the functions that it calls.

    Attributes:
        program: its record.
        model: its entry in the manifest.
        signature: binds calls.
        rows: guards of the calls that it serves.
        session: an open `onnxruntime.InferenceSession`.
        unflatten: puts the program's outputs into the structure of the call's result.
        fallback: takes the calls that the fast path does not serve.
    """

    program: Program
    model: OnnxModel
    signature: Signature
    rows: Sequence[Row]
    session: Any
    unflatten: Callable[[Any], Any]
    fallback: Call

    def function(self) -> Call:
        """Return a function for every call of the program; the fallback, where the program has no fast path."""
        passed = {index for index, spec in enumerate(self.program.inputs) if not isinstance(spec, StateInput)}
        positional, keywords = self.signature.plain_leaves, self.signature.plain_keywords
        bindings = [set(inputs) for inputs in (positional, keywords and keywords.values()) if inputs is not None]
        if not bindings or any(inputs != passed for inputs in bindings) or not self._is_plain():
            return self.fallback
        with_tensors: list[Call] = []

        def without_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not with_tensors:
                if "torch" not in sys.modules:
                    return self.fallback(args, kwargs)
                with_tensors.append(self._of(torch_tensors(), "{}.numpy()", _from_numpy(), self.fallback))
            return with_tensors[0](args, kwargs)

        return self._of(ARRAYS, "{}", np.asarray, without_arrays)

    def _is_plain(self) -> bool:
        """Return whether values go in and out of the model as they are, and it changes and checks nothing."""
        model, program = self.model, self.program
        if model.updates or model.checks or model.state_inputs or program.rebinds or None in program.outputs:
            return False
        if any(isinstance(spec, SizeInput) for spec in program.inputs):
            return False
        metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
        return all(_is_common(meta.dtype) for meta in (*metas, *filter(None, program.outputs)))

    def _of(self, kind: Kind, array: str, convert: Callable[[Any], Any], fallback: Call) -> Call:
        """Return a function for calls with tensors of one kind.

        Args:
            kind: of the tensors.
            array: source of a tensor's array.
            convert: makes the caller's kind of tensor of an array.
            fallback: takes the calls that it does not serve.
        """

        def served(source: GuardSource) -> str:
            arguments = [index for index, spec in enumerate(self.program.inputs) if isinstance(spec, ArgumentInput)]
            feeds = ", ".join(
                f"{source.constant(name)}: {array.format(input_name(index))}"
                for name, index in zip(self.model.inputs, arguments, strict=True)
            )
            run, outputs = source.constant(self.session.run), source.constant(list(self.model.outputs))
            results = f"[{source.constant(convert)}(y) for y in {run}({outputs}, {{{feeds}}})]"
            return f"{source.constant(self.unflatten)}({results})"

        source = GuardSource(kind=kind)
        binding = bind(source, self.signature.plain_leaves, self.signature.plain_keywords)
        return quick_path(source, binding, self.rows, served, fallback, f"{self.program.name} ONNX call")


def _is_common(dtype: str) -> bool:
    """Return whether both numpy and ONNX have a dtype."""
    return dtype == "bool" or dtype.startswith(("int", "uint")) or dtype in ("float16", "float32", "float64")


def _from_numpy() -> Callable[[Any], Any]:
    import torch

    return torch.from_numpy
