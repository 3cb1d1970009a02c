"""The CUDA driver library, by ctypes: modules, functions, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from aotexport_runtime.errors import NotSupported

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


class Driver:
    """Calls of the driver library; every failure raises an error that names the call."""

    def __init__(self, library: Any) -> None:
        """Wrap `library`, the loaded `libcuda`."""
        self._library = library
        self._contexts: dict[int, int] = {}

    @classmethod
    def load(cls) -> Driver:
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
        return cls(library)

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

    def load_module(self, code: bytes) -> int:
        """Return the handle of a module with machine code or PTX; it lives as long as the context."""
        module = _HANDLE()
        # PTX must end in NUL; machine code may.
        self._call("cuModuleLoadData", ctypes.byref(module), code + b"\0")
        assert module.value is not None
        return module.value

    def function(self, module: int, name: str, shared_nbytes: int) -> int:
        """Return the handle of a kernel, allowed to use dynamic shared memory of a size."""
        function = _HANDLE()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        assert function.value is not None
        if shared_nbytes > _DEFAULT_SHARED_NBYTES:
            self._call("cuFuncSetAttribute", function.value, _MAX_DYNAMIC_SHARED_SIZE, shared_nbytes)
        return function.value

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_nbytes: int,
        stream: int,
        parameters: ParameterBlock,
        *,
        cooperative: bool,
    ) -> None:
        """Launch a kernel, given by its handle, in the current context, on the stream of a handle.

        `grid`: blocks per axis. `threads`: those of a block. `shared_nbytes`: dynamic shared memory. `cooperative`: all
        blocks must run at once.
        """
        where = (function, *grid, threads, 1, 1, shared_nbytes, stream, parameters.pointers)
        if cooperative:
            self._call("cuLaunchCooperativeKernel", *where)
        else:
            self._call("cuLaunchKernel", *where, None)
