"""Compiled code, loaded on first use, once per device."""

from __future__ import annotations

import threading
from collections.abc import Callable

from aotexport_runtime.engines.cuda.driver import Driver
from aotexport_runtime.schema.kernels import Kernel, KernelBinary


class Modules:
    """The functions of a bundle's kernels on the devices that they run on."""

    def __init__(self, driver: Driver, code: Callable[[KernelBinary], bytes]) -> None:
        """Prepare to load.

        Args:
            driver: the driver.
            code: returns the bytes of a kernel's code, its digest compared.
        """
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
