"""A kernel on a device: its parameters packed, its grid computed, its code loaded on first use, once per device."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotexport_runtime.engines.cuda.driver import Driver, ParameterBlock
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.targets import (
    Kernel,
    KernelBinary,
    KernelCandidate,
    KernelParameter,
    PointerParameter,
)
from aotexport_runtime.values import dtypes, sizes

WARP = 32
MAX_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)

_FORMATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}


def pack_number(type_: str, value: Any) -> int:
    """Return a number as the driver takes it: an unsigned integer whose low bytes are the value.

    Raises:
        NotSupported: the type (`NumberParameter.type`) cannot hold the value.
    """
    if type_ in _FORMATS:
        return int.from_bytes(struct.pack(_FORMATS[type_], value), "little")
    if type_ == "bf16":
        bits = torch.tensor(float(value), dtype=torch.bfloat16).view(torch.int16).item()
        return int(bits) & 0xFFFF
    width = int(type_[1:])
    number = int(value)
    low, high = (-(1 << width - 1), 1 << width - 1) if type_[0] == "i" and width > 1 else (0, 1 << width)
    if not low <= number < high:
        raise NotSupported(f"{number} does not fit a parameter of type {type_}")
    return number & ((1 << width) - 1)


def grid_of(kernel: Kernel, candidate: KernelCandidate, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the blocks per axis of a launch; any may be 0.

    Raises:
        NotSupported: more blocks than a device takes.
    """
    x, y, z = (axis if isinstance(axis, int) else sizes.evaluate(axis, arguments) for axis in candidate.grid)
    if any(count > limit for count, limit in zip((x, y, z), MAX_GRID, strict=True)):
        raise NotSupported(f"kernel `{kernel.name}` would need {x} x {y} x {z} blocks, more than a device takes")
    return x, y, z


class Modules:
    """The functions of a bundle's kernels on the devices that they run on."""

    def __init__(self, driver: Driver, code: Callable[[KernelBinary], bytes]) -> None:
        """Prepare to load what `code` returns: a kernel's code, its digest compared."""
        self._driver = driver
        self._code = code
        self._functions: dict[tuple[int, str, str], int] = {}
        self._lock = threading.Lock()

    def function(self, kernel: Kernel, binary: KernelBinary, device_index: int) -> int:
        """Return the handle of a kernel on a device, whose context is current to this thread.

        Raises:
            BundleInvalid: the code's digest differs from the record's.
            NotSupported: the driver refuses it.
        """
        key = (device_index, kernel.name, binary.sha256)
        with self._lock:
            if key not in self._functions:
                module = self._driver.load_module(self._code(binary))
                self._functions[key] = self._driver.function(module, kernel.name, binary.shared_nbytes)
            return self._functions[key]


class Launcher:
    """Launches one candidate of a kernel on one device, in whose context it is called."""

    def __init__(
        self,
        kernel: Kernel,
        candidate: KernelCandidate,
        binary: KernelBinary,
        modules: Modules,
        driver: Driver,
        device: torch.device,
        stream: Callable[[], int],
    ) -> None:
        """Prepare a candidate on a CUDA device with its index; `stream` returns the handle of the current stream."""
        self.kernel = kernel
        self.candidate = candidate
        self.binary = binary
        self._modules = modules
        self._driver = driver
        self._device = device
        self._stream = stream
        self._packers = [(parameter.name, _packer(parameter, device)) for parameter in kernel.parameters]
        axes = [axis for axis in candidate.grid if not isinstance(axis, int)]
        self._grid_names = sorted({name for axis in axes for name in sizes.symbols_of(axis)})
        self._last_grid: tuple[list[Any], tuple[int, int, int]] | None = None
        self._blocks: list[ParameterBlock] = []
        self._function: int | None = None

    def grid(self, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the blocks per axis, see `grid_of`; calls mostly repeat the last one's."""
        values = [arguments[name] for name in self._grid_names]
        last = self._last_grid
        if last is not None and last[0] == values:
            return last[1]
        grid = grid_of(self.kernel, self.candidate, arguments)
        self._last_grid = values, grid
        return grid

    def __call__(self, **arguments: Any) -> None:
        """Launch the kernel on the current stream; arguments are tensors and numbers by name.

        Raises:
            NotSupported: the code cannot take an argument, or the driver refuses the launch.
        """
        grid = self.grid(arguments)
        if 0 in grid:
            return
        if self._function is None:
            self._function = self._modules.function(self.kernel, self.binary, self._device.index)
        scratch, address = self._scratch(grid[0] * grid[1] * grid[2])
        try:
            block = self._blocks.pop()
        except IndexError:
            # The first launch, or every block is being filled by another thread.
            block = ParameterBlock(len(self._packers) + 2)
        values = block.values
        for index, (name, pack) in enumerate(self._packers):
            values[index] = pack(arguments[name])
        # After the parameters come the addresses of scratch memory and of a profile; there is no profile.
        values[len(self._packers)] = address
        self._driver.launch(
            self._function,
            grid,
            self.candidate.num_warps * WARP,
            self.binary.shared_nbytes,
            self._stream(),
            block,
            cooperative=self.candidate.cooperative,
        )
        self._blocks.append(block)
        # The allocator gives freed memory to other streams only after this stream has finished with it.
        del scratch

    def _scratch(self, blocks: int) -> tuple[torch.Tensor | None, int]:
        per_block, alignment = self.binary.global_scratch_nbytes, self.binary.global_scratch_alignment
        if not per_block:
            return None, 0
        memory = torch.empty(per_block * blocks + alignment, dtype=torch.uint8, device=self._device)
        return memory, -(-memory.data_ptr() // alignment) * alignment


def _packer(parameter: KernelParameter, device: torch.device) -> Callable[[Any], int]:
    if isinstance(parameter, PointerParameter):
        return _address(parameter, device)
    type_ = parameter.type
    if type_ not in ("i32", "i64"):
        return lambda value: pack_number(type_, value)
    # Nearly every number of a launch; other branches of `pack_number` depend on the type alone.
    end = 1 << int(type_[1:]) - 1

    def integer(value: Any) -> int:
        return value if type(value) is int and 0 <= value < end else pack_number(type_, value)

    return integer


def _address(parameter: PointerParameter, device: torch.device) -> Callable[[Any], int]:
    dtype, alignment = dtypes.dtype(parameter.dtype), parameter.alignment
    # Asking for the index is much faster than for the device; -1 for CPUs.
    index = device.index if device.type == "cuda" else -1

    def address(value: Any) -> int:
        if not isinstance(value, torch.Tensor) or value.dtype is not dtype or value.get_device() != index:
            raise NotSupported(f"kernel parameter `{parameter.name}` needs a tensor of {parameter.dtype} on {device}")
        pointer = value.data_ptr()
        if pointer % alignment:
            raise NotSupported(f"kernel parameter `{parameter.name}` needs an address aligned to {alignment}")
        return pointer

    return address
