"""The engine `cuda`: programs lowered to precompiled kernels."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime.bundle.packs import TARGET, code_of, unpacked
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.cuda import CudaRuntime
from aotexport_runtime.engines.cuda.choice import CompiledCandidate, architectures_for, choose, kernels_of
from aotexport_runtime.engines.cuda.graphs import Capture, GraphedProgram
from aotexport_runtime.engines.cuda.launch import Driver, Launcher
from aotexport_runtime.engines.cuda.trial import Trial
from aotexport_runtime.engines.cuda.tuning import Kept, TunedKernel
from aotexport_runtime.engines.lowered import Lowered, lowered_graphs
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.user_cache import Measurements, cache_folder
from aotexport_runtime.rewrite.partition import forward_returns
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.targets import Kernel
from aotexport_runtime.validate.trees import taken_apart

log = logging.getLogger("aotexport_runtime")


class CudaEngine:
    """Returns lowered programs for CUDA devices; one per loaded bundle."""

    def __init__(self, options: CudaRuntime) -> None:
        self._options = options
        self._driver: Driver | None = None
        self._lock = threading.Lock()

    def check(self, place: torch.device | None) -> torch.device:
        """Return a device that is an NVIDIA GPU; refuse another one (`NotSupported`)."""
        if place is None or place.type != "cuda":
            there = "the devices of the capture" if place is None else place.type
            raise NotSupported(f"kernels run on NVIDIA GPUs, and the bundle is on {there}")
        return place

    def __call__(self, bundle: Bundle, program: Program, environment: Environment) -> Lowered:
        """Return `program` on its kernels.

        Raises:
            NotSupported: they do not run here; says why.
        """
        device = self.check(environment.device)
        if not bundle.has_target(TARGET, program.name):
            raise NotSupported("the bundle has no kernels of this program")
        lowered = self._lowered(bundle, program, environment, device)
        trial = Trial(bundle, program, environment, lowered) if self._options.verify == "first-call" else None
        if self._options.cuda_graphs:
            lowered = with_graphs(lowered, program, Capture(device))
        return dataclasses.replace(lowered, trial=trial)

    def _lowered(self, bundle: Bundle, program: Program, environment: Environment, device: torch.device) -> Lowered:
        properties = torch.cuda.get_device_properties(device)
        available = [pack.architecture for pack in bundle.kernels(TARGET).packs]
        limit = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
        kernels = kernels_of(bundle, program.name)
        capability = properties.major, properties.minor
        chosen = choose(kernels, available, capability, limit)
        if chosen is None:
            raise NotSupported(
                f"it has code for {', '.join(available)}, and none of that runs on {properties.name} "
                f"(sm_{properties.major}{properties.minor})"
            )
        architecture, choices = chosen
        driver = self._load(bundle)
        kept = self._kept(driver, properties.name)
        launches = {kernel.name: _launch(kernel, choices[kernel.name], driver, device, kept) for kernel in kernels}
        fitting = architectures_for(available, capability)
        passed = fitting[: fitting.index(architecture)]
        why = f"; not for {', '.join(passed)}, which some kernel lacks or is too large for" if passed else ""
        log.info("program %s runs on %d kernels for %s%s", program.name, len(kernels), architecture, why)
        return on_device(lowered_graphs(bundle, TARGET, program, environment, launches), driver, device)

    def _load(self, bundle: Bundle) -> Driver:
        with self._lock:
            if self._driver is None:
                pack = functools.cache(functools.partial(unpacked, bundle))
                self._driver = Driver.load(lambda binary: code_of(binary, pack(binary.architecture)))
            return self._driver

    def _kept(self, driver: Driver, device: str) -> Kept | None:
        if not self._options.tune:
            return None
        folder, version = cache_folder("tuned") if self._options.remember else None, driver.version()
        # The driver's compiler makes code of PTX.
        return lambda all_: Measurements(folder, [[each.binary.sha256 for each in all_], device, version])


def _launch(
    kernel: Kernel, choices: Sequence[CompiledCandidate], driver: Driver, device: torch.device, kept: Kept | None
) -> Callable[..., None]:
    launchers = [Launcher(kernel, candidate, binary, driver, device) for candidate, binary in choices]
    return launchers[0] if kept is None or len(launchers) == 1 else TunedKernel(launchers, kept)


def on_device(lowered: Lowered, driver: Driver, device: torch.device) -> Lowered:
    """Return `lowered` such that the thread that runs it is on its device, in its context, on torch's stream."""

    def there(function: Function) -> Function:
        def run(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            with torch.cuda.device(device):
                driver.enter(device.index)
                driver.thread.stream = torch.cuda.current_stream(device).cuda_stream
                return function(args, symbols)

        return run

    backward = None if lowered.backward is None else there(lowered.backward)
    return dataclasses.replace(lowered, forward=there(lowered.forward), backward=backward)


def with_graphs(lowered: Lowered, program: Program, capture: Capture) -> Lowered:
    """Return `lowered` with its forward and backward captured where that is safe; see `GraphedProgram`."""
    assert program.functional is not None
    state = {index for index, spec in enumerate(taken_apart(program).inputs) if isinstance(spec, StateInput)}
    graphed = GraphedProgram(lowered, forward_returns(program.functional), state, capture)
    backward = None if lowered.backward is None else graphed.backward
    return dataclasses.replace(lowered, forward=graphed.forward, backward=backward)
