"""`TRITON_INTERPRET=1 python -m aotexport.verify.interpret BUNDLE CANDIDATE`: print results and launches as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from aotexport.errors import VerificationFailed
from aotexport.lower.cuda.worker import module_in
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.launches import replace_device_functions
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.self_test import run_vector, without_target
from aotexport_runtime.engines.cuda import engine as cuda
from aotexport_runtime.engines.cuda.choice import TARGET, kernels_of
from aotexport_runtime.engines.cuda.launch import grid_of, pack_number
from aotexport_runtime.engines.lowered import Lowered, lowered_graphs
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.rewrite.names import random_nodes
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import Kernel, PointerParameter
from aotexport_runtime.values.arguments import class_named


def main() -> None:
    """Run the recorded calls of the programs that have kernels and draw no random numbers."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads TRITON_INTERPRET when it is imported"
    path, candidate = sys.argv[1], int(sys.argv[2])
    bundle, engine = open_bundle(path), InterpreterEngine(candidate)
    namespaces = bundle.manifest.requirements.operator_namespaces
    types = {name: class_named(name) for name in bundle.manifest.requirements.tensor_types}
    for module in bundle.manifest.requirements.operator_modules:
        importlib.import_module(module)
    having = [name for name in bundle.program_names if bundle.has_target(cuda.TARGET, name)]
    functional = {name: bundle.program(name).functional for name in having}
    drawing = [name for name, of in functional.items() if of is not None and random_nodes(bundle.graph(name, of.file))]
    options = LoadOptions(
        target=cuda.TARGET, device="cpu", trust="native", operator_namespaces=namespaces, tensor_types=types
    )
    results = []
    # Masked lanes compute on arbitrary values.
    with (
        patched(Patch(cuda, "CudaEngine", lambda _: engine, "Run kernels in an interpreter")),
        np.errstate(all="ignore"),
    ):
        for entry in bundle.manifest.testvectors:
            if entry.program in having and entry.program not in drawing:
                vector, stored = read_vector(bundle, entry)
                results.append(run_vector(path, entry.name, vector, stored, options))
    found = [dataclasses.asdict(without_target(result, results)) for result in results]
    sys.stdout.write(json.dumps({"results": found, "drawing": drawing, "launches": dict(engine.launches)}) + "\n")


class InterpreterEngine:
    """Makes lowered programs whose kernels are interpreted, by one candidate; the last, if a kernel has fewer.

    `launches` is the number of launches of each kernel, by `name/candidate`.
    """

    def __init__(self, candidate: int) -> None:
        replace_device_functions(Libdevice())
        self._candidate = candidate
        self.launches: Counter[str] = Counter()

    def check(self, place: torch.device | None) -> None:
        """Accept every device."""

    def __call__(self, bundle: Bundle, program: Program, environment: Environment) -> Lowered:
        if not bundle.has_target(TARGET, program.name):
            raise NotSupported("the bundle has no kernels of this program")
        kernels = {kernel.name: self._launcher(bundle, kernel) for kernel in kernels_of(bundle, program.name)}
        return lowered_graphs(bundle, TARGET, program, environment, kernels)

    def _launcher(self, bundle: Bundle, kernel: Kernel) -> Any:
        index = min(self._candidate, len(kernel.candidates) - 1)
        candidate = kernel.candidates[index]
        function = _function(bundle.file(f"targets/{TARGET}/kernels/{kernel.source}"), kernel.name)
        constants = {constant.name: constant.value for constant in candidate.constants}

        def launch(**arguments: Any) -> None:
            _check_assumptions(kernel, arguments)
            grid = grid_of(kernel, candidate, arguments)
            passed = {name: value for name, value in arguments.items() if name not in kernel.grid_arguments}
            fixed = {name: value for name, value in constants.items() if name in function.arg_names}
            self.launches[f"{kernel.name}/{index}"] += 1
            if 0 not in grid:
                function[grid](**passed, **fixed)

        return launch


def _check_assumptions(kernel: Kernel, arguments: dict[str, Any]) -> None:
    """Check what compiled code assumes of its arguments, which interpreted code does not need."""
    for parameter in kernel.parameters:
        value = arguments[parameter.name]
        if isinstance(parameter, PointerParameter):
            fits = isinstance(value, torch.Tensor) and value.data_ptr() % parameter.alignment == 0
        else:
            pack_number(parameter.type, value)
            fits = parameter.multiple_of == 1 or value % parameter.multiple_of == 0
        if not fits:
            raise VerificationFailed(f"kernel {kernel.name}: `{parameter.name}` is not what the code assumes", [])


def _function(path: Path, name: str) -> Any:
    module = module_in(path, name)
    if hasattr(module, "libdevice"):
        module.__dict__["libdevice"] = Libdevice()
    return getattr(module, name)


_SAME_NAME = (
    *("erf", "erfc", "erfinv", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "tanh"),
    *("sinh", "cosh", "tan", "sin", "cos", "asin", "acos", "atan", "asinh", "acosh", "atanh", "floor", "ceil", "trunc"),
    *("abs", "lgamma", "isnan", "isinf", "signbit", "pow", "fmod", "atan2", "hypot", "copysign", "nextafter"),
)
_OTHER_NAMES = {
    "nearbyint": torch.round,
    "rint": torch.round,
    "fabs": torch.abs,
    "sqrt_rn": torch.sqrt,
    "div_rn": torch.div,
}
_TO_BOOL = ("isnan", "isinf", "signbit")


class Libdevice:
    """Replaces `libdevice` in a kernel's module."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(torch, name) if name in _SAME_NAME else _OTHER_NAMES.get(name)
        if function is None:
            raise VerificationFailed(f"the interpreter has no function for `libdevice.{name}`", [])
        return lambda *args: _apply(function, args, to_bool=name in _TO_BOOL)


def _apply(function: Callable[..., torch.Tensor], args: tuple[Any, ...], *, to_bool: bool) -> Any:
    first = next(arg for arg in args if isinstance(arg, tl.tensor))
    operands = [_operand(arg) for arg in args]
    data = function(*operands).numpy()
    scalar = tl.int1 if to_bool else first.dtype.scalar
    data = data if to_bool else data.astype(first.handle.data.dtype)
    type_ = tl.block_type(scalar, list(first.shape)) if isinstance(first.type, tl.block_type) else scalar
    return tl.tensor(TensorHandle(data, scalar), type_)


def _operand(arg: Any) -> torch.Tensor:
    if not isinstance(arg, tl.tensor):
        return torch.tensor(getattr(arg, "value", arg))
    return torch.from_numpy(np.ascontiguousarray(arg.handle.data)).reshape(arg.handle.data.shape)


if __name__ == "__main__":
    main()
