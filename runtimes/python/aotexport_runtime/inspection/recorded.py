"""A recorded call of a program, run again: its sizes, and the call with its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs, returning_whole_result, whole_result_tree
from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.execution.autocast import device_type_of, under_autocast
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.vectors import VectorInput
from aotexport_runtime.values.arguments import class_named, imported
from aotexport_runtime.values.observe import make_inputs
from aotexport_runtime.values.sizes import describe_range


def portable(imports: Iterable[str], namespaces: Iterable[str], types: Iterable[str]) -> LoadOptions:
    """Return how to load a bundle by its graphs with what its user allows; the modules `imports` are imported."""
    for name in imports:
        imported(name)
    own = {name: class_named(name) for name in types}
    return LoadOptions(target="portable", check_digests=False, operator_namespaces=tuple(namespaces), tensor_types=own)


def recorded_sizes(bundle: Bundle, program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """Return a value per symbol of `program`: that of `given`, by the dimension's name, else as in a recorded call.

    Raises:
        ArgumentInvalid: a given value is outside of the range of its dimension.
    """
    entry = next((entry for entry in bundle.manifest.testvectors if entry.program == program.name), None)
    specs = {} if entry is None else {spec.path: spec for spec in bundle.vector(entry).inputs}
    found: dict[str, int] = {}
    for dimension in program.dimensions:
        source, value = program.inputs[dimension.input_index], given.get(dimension.name)
        if value is None:
            assert isinstance(source, ArgumentInput | SizeInput)
            spec: VectorInput | None = specs.get(source.path)
            if spec is None:
                raise ArgumentInvalid(f"program `{program.name}` has no recorded call: give --size {dimension.name}=N")
            seen = spec.shape[dimension.axis] if spec.value is None else spec.value
            value = (seen - dimension.offset) // dimension.factor
        elif value < (dimension.min or 0) or value > (value if dimension.max is None else dimension.max):
            within = describe_range(dimension.min, dimension.max)
            raise ArgumentInvalid(f"{dimension.name}={value}: program `{program.name}` takes {within}")
        found[dimension.symbol] = value
    return found


def recorded_call(module: BundleModule, program: Program) -> Callable[[], Any] | None:
    """Return a function that runs the first recorded call, with its backward where the program records gradients.

    It puts the module in the mode of the program. None: there is no recorded call.
    """
    bundle = module.bundle
    entry = next((entry for entry in bundle.manifest.testvectors if entry.program == program.name), None)
    if entry is None:
        return None
    vector, stored = read_vector(bundle, entry)
    function, arguments = returning_whole_result(program, module.program(program.name)), arguments_of(program)
    device = next((tensor.device for tensor in module.state_tensors().values()), module.device)
    module.train(program.mode == "train")

    def run() -> None:
        values = make_inputs(vector.inputs, stored, device, module.form).values
        args, kwargs = arguments(values, module.state_tensors())
        with torch.set_grad_enabled(program.grad), under_autocast(device_type_of(program, device), program.autocast):
            result = function(*args, **kwargs)
        found = [value for _, value in flat_outputs(whole_result_tree(program), result)]
        outputs = [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
        if program.grad and outputs:
            torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
        module.zero_grad(set_to_none=True)

    return run
