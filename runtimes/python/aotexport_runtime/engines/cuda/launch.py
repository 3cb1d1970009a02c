"""A kernel on a device, by the CUDA driver library: parameters packed, grid computed, code loaded on first use."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.targets import Kernel, KernelBinary, KernelCandidate, KernelParameter, PointerParameter
from aotexport_runtime.values import dtypes, sizes

# --- the driver library, by ctypes --------------------------------------------------------------------------

_MAX_DYNAMIC_SHARED_SIZE = 8  # `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
_DEFAULT_SHARED_NBYTES = 48 << 10
"""Most dynamic shared memory that a launch gets without an attribute of the function."""

_COUNT = ctypes.c_uint
_HANDLE = ctypes.c_void_p
_LAUNCH = [_HANDLE, *[_COUNT] * 7, _HANDLE, ctypes.POINTER(_HANDLE)]
_ARGUMENTS: dict[str, list[Any]] = {
    "cuCtxSetCurrent": [_HANDLE],
    "cuLaunchCooperativeKernel": _LAUNCH,
    "cuLaunchKernel": [*_LAUNCH, _HANDLE],
    "cuModuleGetFunction": [_HANDLE, _HANDLE, ctypes.c_char_p],
    "cuModuleLoadData": [_HANDLE, ctypes.c_char_p],
    "cuFuncSetAttribute": [_HANDLE, ctypes.c_int, ctypes.c_int],
}
"""Types of arguments, so that plain integers are passed in the right width."""


class ParameterBlock:
    """Memory for the parameters of a launch; later launches reuse it, since the driver copies it."""

    def __init__(self, count: int) -> None:
        self.values = (ctypes.c_uint64 * count)()
        """The low bytes of each, in little-endian order, are its value."""
        start = ctypes.addressof(self.values)
        self.pointers = (_HANDLE * count)(*range(start, start + 8 * count, 8))
        """Where each value is; the driver takes as many as the kernel declares."""


class _Thread(threading.local):
    stream = 0


class Driver:
    """Calls of the driver library; every failure raises an error that names the call.

    Attributes:
        thread: `stream` is the handle of the stream that this thread launches on: torch is asked once per pass.
    """

    def __init__(self, library: Any, code: Callable[[KernelBinary], bytes]) -> None:
        """Wrap `library`, the loaded `libcuda`; `code` returns a kernel's code, its digest compared."""
        self.thread = _Thread()
        self._library = library
        self._code = code
        self._contexts: dict[int, int] = {}
        self._functions: dict[tuple[int, str, str], int] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, code: Callable[[KernelBinary], bytes]) -> Driver:
        """Return the driver of this machine.

        Raises:
            NotSupported: there is none.
        """
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotSupported(f"the CUDA driver library cannot be loaded: {error}") from None
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
        return cls(library, code)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise NotSupported(f"{name} failed: {(text.value or b'?').decode()} ({code})")

    def version(self) -> int:
        """Return the newest version of CUDA that the driver knows: 12040 is 12.4."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def enter(self, device_index: int) -> None:
        """Make the device's primary context, which torch uses as well, current to this thread."""
        primary = self._contexts.get(device_index)
        if primary is None:
            device, context = ctypes.c_int(), _HANDLE()
            self._call("cuDeviceGet", ctypes.byref(device), device_index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            assert context.value is not None
            primary = self._contexts[device_index] = context.value
        current = _HANDLE()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != primary:
            self._call("cuCtxSetCurrent", primary)

    def function(self, name: str, binary: KernelBinary, device_index: int) -> int:
        """Return the handle of a kernel on a device, whose context is current to this thread.

        Raises:
            BundleInvalid: the code's digest differs from the record's.
            NotSupported: the driver refuses it.
        """
        key = (device_index, name, binary.sha256)
        with self._lock:
            if key not in self._functions:
                module, function = _HANDLE(), _HANDLE()
                # PTX must end in NUL; machine code may.
                self._call("cuModuleLoadData", ctypes.byref(module), self._code(binary) + b"\0")
                self._call("cuModuleGetFunction", ctypes.byref(function), module.value, name.encode())
                assert function.value is not None
                if binary.shared_nbytes > _DEFAULT_SHARED_NBYTES:
                    self._call("cuFuncSetAttribute", function.value, _MAX_DYNAMIC_SHARED_SIZE, binary.shared_nbytes)
                self._functions[key] = function.value
            return self._functions[key]

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_nbytes: int,
        parameters: ParameterBlock,
        *,
        cooperative: bool,
    ) -> None:
        """Launch a kernel, given by its handle, in the current context, on the stream of this thread.

        `grid`: blocks per axis. `threads`: those of a block. `shared_nbytes`: dynamic shared memory. `cooperative`: all
        blocks must run at once.
        """
        where = (function, *grid, threads, 1, 1, shared_nbytes, self.thread.stream, parameters.pointers)
        if cooperative:
            self._call("cuLaunchCooperativeKernel", *where)
        else:
            self._call("cuLaunchKernel", *where, None)


# --- launches -----------------------------------------------------------------------------------------------

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


class Launcher:
    """Launches one candidate of a kernel on one device, in whose context it is called."""

    def __init__(
        self, kernel: Kernel, candidate: KernelCandidate, binary: KernelBinary, driver: Driver, device: torch.device
    ) -> None:
        """Prepare a candidate on a CUDA device with its index."""
        self.kernel = kernel
        self.candidate = candidate
        self.binary = binary
        self._driver = driver
        self._device = device
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
            self._function = self._driver.function(self.kernel.name, self.binary, self._device.index)
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
