"""Shared libraries of compiled graphs, loaded into this process, and the backends of their matmuls.

AOTInductor's runner is a private name of torch; the public one imports its compiler. The first call of a library notes
its matmuls, and the backend of each is decided after it (`aotexport/lower/cpu/matmul.h`). A library without that table
runs as torch runs it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.execution.matmul.onednn import prefers_onednn
from aotexport_runtime.execution.matmul.sizes import Mode

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A loaded library: called with its inputs, returns its results."""


def _load(path: Path) -> Runner:
    try:
        runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return runner(loader_name(path), 1).run
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise NotSupported(f"the library `{path.name}` cannot be loaded: {reason}") from None


_names: dict[tuple[str, int, int], str] = {}
"""Names that files were loaded by; keys are path, device and inode."""


def loader_name(path: Path) -> str:
    """Return a name by which the system's loader opens the file that is at `path` now; none: `OSError`.

    The loader takes a known name for the file that it loaded before, even if another has replaced it: another export to
    the same directory, a link that leads elsewhere. Another spelling of the path makes the loader open the file.
    """
    status = path.stat()
    key = str(path), status.st_dev, status.st_ino
    if key not in _names:
        before = sum(other == key[0] for other, *_ in _names)
        _names[key] = f"{path.parent}/{'./' * before}{path.name}"
    return _names[key]


# --- matmuls ------------------------------------------------------------------------------------------------

_CAPACITY = 128
_MODES: tuple[Mode | None, ...] = (None, "fastest", "onednn", "torch")
"""Modes by their numbers in the table."""


class _Matmul(ctypes.Structure):
    _fields_ = (("is_", ctypes.c_int64 * 8), ("by_onednn", ctypes.c_int64))


class _MatmulTable(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("mode", "count", "is_closed")),
        ("matmuls", _Matmul * _CAPACITY),
    )


class Library:
    """A loaded library; the backends of its matmuls are decided before it returns its first results.

    Attributes:
        run: takes the library's inputs, returns its results.
    """

    run: Runner

    def __init__(self, path: Path, mode: Mode) -> None:
        """Load the shared library at `path`, with a matmul backend; loading runs code of the library.

        Raises:
            NotSupported: it cannot be loaded here, or is loaded in another mode; its backends are decided only once.
        """
        self._run = run = _load(path)
        self._mode: Mode = mode
        self._lock = threading.Lock()
        table = table_of(path)
        if table is None:
            self.run = run
            return
        other = _MODES[table.mode]
        if other not in (None, mode):
            raise NotSupported(
                f"this process has the library `{path.name}` loaded with matmul=`{other}`; for matmul=`{mode}`, "
                "load it in another process"
            )
        table.mode = _MODES.index(mode)
        table.is_closed = table.is_closed or mode == "torch"
        self._table = table
        self.run = run if table.is_closed else self._first_run

    def _first_run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decide the backend of each matmul, and close the table; run again if oneDNN computes any."""
        with self._lock:
            random_state = torch.get_rng_state()
            results, table = self._run(inputs), self._table
            if not table.is_closed:
                matmuls = table.matmuls[: table.count]
                for matmul in matmuls:
                    matmul.by_onednn = self._prefers_onednn(list(matmul.is_))
                table.is_closed = True
                if any(matmul.by_onednn for matmul in matmuls):
                    torch.set_rng_state(random_state)
                    results = self._run(inputs)
            self.run = self._run
            return results

    def _prefers_onednn(self, matmul: Sequence[int]) -> bool:
        has_bias, rows, depth, columns, *strides = matmul
        # In the layout that the library computes with; numbers do not matter.
        left = torch.ones(rows * depth).as_strided((rows, depth), strides[:2])
        right = torch.ones(depth * columns).as_strided((depth, columns), strides[2:])
        args = (torch.ones(columns), left, right) if has_bias else (left, right)
        op = "aten::addmm.default" if has_bias else "aten::mm.default"
        return prefers_onednn(op, args, self._mode)


def table_of(path: Path) -> _MatmulTable | None:
    """Return the table of matmuls of a loaded library, in its own memory; None: it has none."""
    try:
        table_function = ctypes.CDLL(loader_name(path)).aotexport_products
    except (OSError, AttributeError):
        return None
    table_function.restype = ctypes.POINTER(_MatmulTable)
    return table_function().contents
