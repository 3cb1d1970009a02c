"""The program of a bundle that a server calls: flat values in, flat tensors out, several calls as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from aotexport_runtime.adapters import load_adapter, use_adapter
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.module.compose import program_of
from aotexport_runtime.module.loading import load
from aotexport_runtime.module.module_class import methods_of
from aotexport_runtime.serving import warm_up
from aotexport_runtime.serving.interface import interface_of
from aotexport_runtime.serving.joining import Values
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation
from aotexport_runtime.values.tensors import is_torch_tensor


class ServedProgram:
    """The program of `forward` for evaluation without gradients, loaded; one thread at a time calls it.

    Attributes:
        name: its name.
        target: engine that was asked for.
        module: the loaded bundle.
        interface: its named inputs and outputs.
        variants: names of the program and its variants.
        adapters: names of the adapters that calls may ask for.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        target: str,
        device: str,
        threads: int | None,
        trust: Literal["data", "native"],
        mapped: bool | None,
        adapters: Mapping[str, Path],
    ) -> None:
        """Load the bundle, and adapters from directories, by name; the other arguments are those of `Servable`.

        Raises:
            ArgumentInvalid: an adapter cannot be read, or is one of other weights.
            NotSupported: see `load`; or the bundle has no program for evaluation, or clients cannot call it.
        """
        with torch.no_grad():
            self.name = program_of("forward", methods_of(bundle), training=False)
        self.variants = bundle.manifest.with_variants(self.name)
        programs = [bundle.program(name) for name in self.variants]
        self.interface = interface_of(programs)
        self.target = target
        if threads is not None:
            torch.set_num_threads(threads)
        # Copies of mapped weights would be memory that processes do not share.
        frozen = not mapped and not adapters
        self.module = load(bundle, target=target, device=device, trust=trust, mapped=mapped, frozen=frozen).eval()
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for name, path in adapters.items():
            load_adapter(self.module, path, name=name)
        for parameter in trainable:  # Adapters freeze them, and recorded calls are compared with gradients and all.
            parameter.requires_grad_(True)
        self.adapters = tuple(adapters)
        self._program = programs[0]
        self._function = self.module.program(self.name)
        self._arguments = [arguments_of(program) for program in programs]
        self._device = torch.device(device)
        # The model's own gradients are not recorded in inference mode.
        inference = all("inference_mode" not in program.fixed for program in programs)
        self._without_gradients: Any = torch.inference_mode if inference else torch.no_grad

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        """Return a tensor or number per output of the interface.

        Args:
            values: borrowed; a tensor that the model writes to is changed, as in eager execution.
            choice: index of the program whose constants the call has.

        Raises:
            CallInvalid: the call does not fit the program.
        """
        tensors = [value if isinstance(value, int) else self._tensor(value) for value in values]
        with self._without_gradients():
            args, kwargs = self._arguments[choice](tensors, self.module.state_tensors())
            result = self._function(*args, **kwargs)
            return [value for _, value in flat_outputs(self._program.output_tree, result)]

    def applying(self, adapter: str | None) -> AbstractContextManager[None]:
        """Return a context in which calls of this thread apply an adapter; None: none, as outside of it."""
        return use_adapter(self.module, [adapter] if adapter else []) if self.adapters else nullcontext()

    def check_recorded_calls(self, bundle: Bundle) -> list[Values]:
        """Run the recorded calls; return their arguments. See `warm_up.check_recorded_calls`."""
        return warm_up.check_recorded_calls(bundle, self.module, self.variants, self.target)

    def recorded_values(self, bundle: Bundle) -> Values | None:
        """Return the arguments of the first recorded call of the program or a variant; None: there is none."""
        return warm_up.recorded_values(bundle, self.module, self.variants)

    def agree(self, expected: Sequence[Any], got: Sequence[Any]) -> bool:
        """Return whether outputs are equal within the tolerance of their dtype."""
        return all(each.agrees for each in compare(_observation(expected), _observation(got)))

    def rounded(self, array: np.ndarray[Any, Any], dtype: str) -> Any:
        """Return a float32 array as a tensor of a dtype that numpy lacks."""
        return torch.tensor(array, dtype=dtypes.dtype(dtype))

    def _tensor(self, value: Any) -> torch.Tensor:
        if not is_torch_tensor(value):
            # A tensor cannot keep a caller from writing, nor have steps backwards.
            fits = value.flags.writeable and all(step >= 0 for step in value.strides)
            value = torch.from_numpy(value if fits else value.copy())
        return value.to(self._device)


def _observation(outputs: Sequence[Any]) -> Observation:
    values = {str(index): value.detach().cpu().reshape(-1) for index, value in enumerate(outputs)}
    facts = {str(index): f"{value.dtype}{list(value.shape)}" for index, value in enumerate(outputs)}
    return Observation(facts, values)
