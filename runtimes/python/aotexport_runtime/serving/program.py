"""The program of a bundle that a server calls by torch: flat values in, flat tensors out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from aotexport_runtime.adapters import load_adapter, use_adapter
from aotexport_runtime.adapters.base import checksum
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.commands.self_test import observe_vector
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.compose import program_of
from aotexport_runtime.module.loading import load
from aotexport_runtime.module.module_class import methods_of
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.serving.joining import AnyProgram, Values, result_of
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import path_of
from aotexport_runtime.values.compare import TOLERANCES
from aotexport_runtime.values.observe import make_inputs
from aotexport_runtime.values.tensors import is_torch_tensor


class ServedProgram(AnyProgram):
    """The program for evaluation without gradients, loaded.

    Attributes:
        module: the loaded bundle.
    """

    def __init__(self, bundle: Bundle, target: str, options: ServableOptions) -> None:
        """Load the bundle, and its adapters.

        Raises:
            ArgumentInvalid: an adapter cannot be read, or is one of other weights.
            NotSupported: see `load`; or the bundle has no program for evaluation, or clients cannot call it.
        """
        with torch.no_grad():
            name = program_of("forward", methods_of(bundle), training=False)
        super().__init__(bundle, bundle.manifest.with_variants(name), target)
        self.least = least_of(options)
        self.module = load_served(bundle, target, options)
        self.adapters = tuple(options.adapters or ())
        self._output_tree = self.programs[0].output_tree
        self._function = self.module.program(name)
        self._arguments = [arguments_of(program) for program in self.programs]
        self._device = torch.device(options.device)
        self._without_gradients = without_gradients(self.programs)

    @property
    def engine(self) -> str:
        return self.module.explain_program(self.name).engines[0]

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        tensors = [value if isinstance(value, int) else self._tensor(value) for value in values]
        with self._without_gradients():
            args, kwargs = self._arguments[choice](tensors, self.module.state_tensors())
            result = self._function(*args, **kwargs)
            return [value for _, value in flat_outputs(self._output_tree, result)]

    def applying(self, adapter: str | None) -> AbstractContextManager[None]:
        return use_adapter(self.module, [adapter] if adapter else []) if self.adapters else nullcontext()

    def values_of(self, entry: VectorEntry) -> Values:
        return self._made(*read_vector(self.bundle, entry))

    def _made(self, vector: Vector, stored: dict[str, torch.Tensor]) -> Values:
        return make_inputs(vector.inputs, stored, self.module.device, self.module.form).values

    def run_recorded(self) -> Iterator[tuple[Values, VectorResult]]:
        for vector, stored, result in run_recorded(self.module, self.recorded_calls, self.target, self.least):
            yield self._made(vector, stored), result

    def rounded(self, array: np.ndarray[Any, Any], dtype: str) -> Any:
        return torch.tensor(array, dtype=dtypes.dtype(dtype))

    def _tensor(self, value: Any) -> torch.Tensor:
        if not is_torch_tensor(value):
            # A tensor cannot keep a caller from writing, nor have steps backwards.
            fits = value.flags.writeable and all(step >= 0 for step in value.strides)
            value = torch.from_numpy(value if fits else value.copy())
        return value.to(self._device)


def load_served(bundle: Bundle, target: str, options: ServableOptions) -> BundleModule:
    """Return the bundle in evaluation mode, with its adapters, none of which is applied.

    Raises:
        ArgumentInvalid: an adapter cannot be read, or is one of other weights.
        NotSupported: see `load`.
    """
    adapters = {name: path_of("adapters", path) for name, path in (options.adapters or {}).items()}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Copies of mapped weights would be memory that processes do not share.
    frozen = not options.mapped and not adapters if options.precision == "float32" else options.precision
    device, trust, mapped = options.device, options.trust, options.mapped
    module = load(bundle, target=target, device=device, trust=trust, mapped=mapped, frozen=frozen).eval()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for adapter, path in adapters.items():
        load_adapter(module, path, name=adapter)
    for parameter in trainable:  # Adapters freeze them, and recorded calls are compared with gradients and all.
        parameter.requires_grad_(True)
    return module


def least_of(options: ServableOptions) -> float:
    """Return the error that values may have by the precision of layers, see `AnyProgram.least`."""
    return 0.0 if options.precision == "float32" else TOLERANCES[options.precision]


def without_gradients(programs: Iterable[Program]) -> Callable[[], AbstractContextManager[Any]]:
    """Return the mode in which calls of programs record no gradients."""
    # The model's own gradients are not recorded in inference mode.
    return torch.no_grad if any("inference_mode" in program.fixed for program in programs) else torch.inference_mode


def run_recorded(
    module: BundleModule, entries: Iterable[VectorEntry], target: str, least: float
) -> Iterator[tuple[Vector, dict[str, torch.Tensor], VectorResult]]:
    """Run recorded calls; yield each with its stored tensors and its result; `least`: see `AnyProgram`.

    Raises:
        NotSupported: calls change the module's state.
    """
    before = _state(module)
    for entry in entries:
        vector, stored = read_vector(module.bundle, entry)
        expected, got = recorded_observation(vector, stored), observe_vector(module, vector, stored)
        module.zero_grad()
        yield vector, stored, result_of(module.bundle, target, least, entry, vector, expected, got)
    module.eval()
    changed = [name for name, state in _state(module).items() if state != before[name]]
    changed += [attribute.name for attribute in module.bundle.manifest.attributes]
    if changed:
        raise NotSupported(
            f"calls change the module's {', '.join(f'`{name}`' for name in changed)}, and what one client is answered "
            "would depend on the calls of others. Let the model's `forward` take this state and return it, and export "
            "again"
        )


def _state(module: BundleModule) -> dict[str, tuple[int, int, int]]:
    # Batch norm raises no version.
    return {name: (id(t), t._version, checksum(t)) for name, t in module.state_tensors().items()}
