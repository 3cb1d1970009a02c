"""Matmuls inside of a shared library: its first call notes them, and the backend of each is decided after it.

The other side is `aotexport/lower/cpu/matmul.h`. A library without that table runs as torch runs it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aotexport_runtime.engines.cpu.library import loader_name
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.execution.matmul.measured import described, faster_by_onednn
from aotexport_runtime.execution.matmul.sizes import Mode

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

_CAPACITY = 128
_MODES: tuple[Mode | None, ...] = (None, "fastest", "onednn", "torch")
"""Modes by their numbers in the table."""


class _Matmul(ctypes.Structure):
    _fields_ = (("is_", ctypes.c_int64 * 8), ("by_onednn", ctypes.c_int64))


class _MatmulTable(ctypes.Structure):
    _fields_ = (
        ("mode", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("is_closed", ctypes.c_int64),
        ("matmuls", _Matmul * _CAPACITY),
    )


class ChoosingRunner:
    """Runs a library; the backends of its matmuls are decided before it returns its first results.

    Attributes:
        run: takes the library's inputs, returns its results.
    """

    run: Run

    def __init__(self, path: Path, run: Run, mode: Mode) -> None:
        """Run the library at `path`, which is loaded already, by `run`.

        Args:
            path: path of a library that the caller trusts.
            run: calls it; the same inputs and random state give the same results.
            mode: the matmul backend.

        Raises:
            NotSupported: the process has the library loaded in another mode; its backends are decided only once.
        """
        self._run = run
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
        with self._lock:
            random_state = torch.get_rng_state()
            results = self._run(inputs)
            if not self._table.is_closed and self._decide(self._table):
                torch.set_rng_state(random_state)
                results = self._run(inputs)
            self.run = self._run
            return results

    def _decide(self, table: _MatmulTable) -> bool:
        """Decide the backend of each matmul and close the table; return whether oneDNN computes any."""
        for matmul in table.matmuls[: table.count]:
            matmul.by_onednn = onednn.available() and self._prefers_onednn(list(matmul.is_))
        table.is_closed = True
        return any(matmul.by_onednn for matmul in table.matmuls[: table.count])

    def _prefers_onednn(self, matmul: Sequence[int]) -> bool:
        if self._mode == "onednn":
            return True
        has_bias, rows, depth, columns, *strides = matmul
        # In the layout that the library computes with; numbers do not matter.
        left = torch.ones(rows * depth).as_strided((rows, depth), strides[:2])
        right = torch.ones(depth * columns).as_strided((depth, columns), strides[2:])
        args = (torch.ones(columns), left, right) if has_bias else (left, right)
        op = "aten::addmm.default" if has_bias else "aten::mm.default"
        torchs = torch.addmm if has_bias else torch.mm
        return faster_by_onednn(
            described(op, args), functools.partial(onednn.MATMULS[op], *args), functools.partial(torchs, *args)
        )


def table_of(path: Path) -> _MatmulTable | None:
    """Return the table of matmuls of a loaded library, in its own memory; None: it has none."""
    try:
        table_function = ctypes.CDLL(loader_name(path)).aotexport_products
    except (OSError, AttributeError):
        return None
    table_function.restype = ctypes.POINTER(_MatmulTable)
    return table_function().contents
