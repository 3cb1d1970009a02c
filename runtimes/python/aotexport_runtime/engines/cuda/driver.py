"""The CUDA driver library, by ctypes: modules, functions, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from aotexport_runtime.errors import NotSupported

_MAX_DYNAMIC_SHARED_SIZE = 8
"""`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`."""

_DEFAULT_SHARED_NBYTES = 48 << 10
"""More dynamic shared memory than this must be asked for."""


class Driver:
    """Calls of the driver library; every failure is an error that names the call."""

    def __init__(self, library: Any) -> None:
        """Wrap `library`, the loaded `libcuda`."""
        self._library = library

    @classmethod
    def load(cls) -> Driver:
        """Return the driver of this machine.

        Raises:
            NotSupported: there is none.
        """
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise NotSupported(f"the CUDA driver library cannot be loaded: {error}") from None

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise NotSupported(f"{name} failed: {(text.value or b'?').decode()} ({code})")

    def enter(self, device_index: int) -> None:
        """Make the device's primary context, which torch uses as well, current to this thread unless one is."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)

    def load_module(self, code: bytes) -> int:
        """Return the handle of a module with machine code or PTX; it lives as long as the context."""
        module = ctypes.c_void_p()
        # PTX ends in NUL; machine code bears it.
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code + b"\0"))
        assert module.value is not None
        return module.value

    def function(self, module: int, name: str, shared_nbytes: int) -> int:
        """Return the handle of a kernel, allowed to use dynamic shared memory of a size."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        if shared_nbytes > _DEFAULT_SHARED_NBYTES:
            self._call(
                "cuFuncSetAttribute",
                function,
                ctypes.c_int(_MAX_DYNAMIC_SHARED_SIZE),
                ctypes.c_int(shared_nbytes),
            )
        assert function.value is not None
        return function.value

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_nbytes: int,
        stream: int,
        parameters: Sequence[int],
        *,
        cooperative: bool,
    ) -> None:
        """Launch a kernel.

        Args:
            function: its handle.
            grid: blocks per axis.
            threads: threads per block.
            shared_nbytes: dynamic shared memory.
            stream: handle of the stream.
            parameters: the low bytes of each, in little-endian order, are its value; the driver takes as many as the
                kernel declares.
            cooperative: whether all blocks must run at once.
        """
        values = (ctypes.c_uint64 * len(parameters))(*parameters)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(parameters))(*range(start, start + 8 * len(parameters), 8))
        blocks = [ctypes.c_uint(count) for count in (*grid, threads, 1, 1)]
        name = "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel"
        rest = () if cooperative else (None,)
        self._call(
            name,
            ctypes.c_void_p(function),
            *blocks,
            ctypes.c_uint(shared_nbytes),
            ctypes.c_void_p(stream),
            pointers,
            *rest,
        )
