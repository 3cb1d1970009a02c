"""Which product of a functional graph runs by which library: decided at its first call, for the process."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from aotexport_runtime import ops
from aotexport_runtime.engines.products import onednn
from aotexport_runtime.engines.products.kept import Kept
from aotexport_runtime.engines.products.trial import clearly_faster
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import TensorMeta, ValueMeta
from aotexport_runtime.user_cache import cache_folder

log = logging.getLogger("aotexport_runtime")

Mode = Literal["fastest", "onednn", "torch"]
VARIABLE = "AOTEXPORT_PRODUCTS"
"""Environment variable with the mode of callers who name none."""

_LEAST_SIZE = 16
_LEAST_WORK = 1 << 21
"""Multiplications from which on a product is worth measuring: below, oneDNN's fixed cost weighs."""

_BUDGET_S = 0.3
"""How long a process measures at most, in seconds."""


def mode_of(name: str | None) -> Mode:
    """Return the mode that the caller, or else the environment, names.

    Raises:
        NotSupported: there is none of that name.
    """
    chosen = os.environ.get(VARIABLE, "fastest") if name is None else name
    if chosen not in ("fastest", "onednn", "torch"):
        asked = f"environment variable {VARIABLE} asks for" if name is None else "no"
        raise NotSupported(f"{asked} `{chosen}` products; there are fastest, onednn, torch")
    return chosen


def first_calls(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, FirstCall]:
    """Return what serves the first call of each product that another library may compute, by the value's name.

    Args:
        nodes: functional operators that run on the processor, where nothing records gradients.
        metas: metadata of their operands.
        mode: `torch`: there are none.
    """
    if mode == "torch":
        return {}
    return {node.name: FirstCall(node.op, mode) for node in nodes if _may_choose(node, metas, mode)}


class FirstCall:
    """Stands for a product until it is called with tensors, and then puts the function that was chosen in its place."""

    def __init__(self, op: str, mode: Mode) -> None:
        """Stand for an operator of `onednn.PRODUCTS`."""
        torchs = ops.direct(op)
        assert torchs is not None
        self._op = op
        self._mode = mode
        self._torchs = torchs
        self._put: Callable[[Callable[..., Any]], None] | None = None

    def stands_in(self, scope: dict[str, Any], name: str) -> None:
        """Put what is chosen into `scope` as `name`."""
        self._put = functools.partial(scope.__setitem__, name)

    def __call__(self, *args: Any) -> Any:
        """Return the product."""
        # Tensors of tracers and transforms say nothing about time.
        if not all(type(arg) in (torch.Tensor, torch.nn.Parameter) for arg in args if arg is not None):
            return self._torchs(*args)
        chosen = onednn.PRODUCTS[self._op] if self._prefers_onednn(args) else self._torchs
        if self._put is not None:
            self._put(chosen)
        return chosen(*args)

    def _prefers_onednn(self, args: Sequence[Any]) -> bool:
        _, rows, matrix = onednn.operands(self._op, args)
        if not onednn.available() or rows.device.type != "cpu" or not onednn.takes(matrix, matrix.t()):
            return False
        if self._mode == "onednn":
            return True
        runs = (functools.partial(run, *args) for run in (onednn.PRODUCTS[self._op], self._torchs))
        return faster_by_onednn(described(self._op, args), *runs)


def _may_choose(node: Node, metas: Mapping[str, ValueMeta], mode: Mode) -> bool:
    """Return whether `node` is a product that oneDNN may compute: of matrices of float32 and known sizes.

    With sizes that change, oneDNN would prepare itself anew for each, which takes longer than what it gains.
    """
    if node.op not in onednn.PRODUCTS or node.kwargs:
        return False
    bias, rows, matrix = (_matrix(argument, metas) for argument in onednn.operands(node.op, node.args))
    if rows is None or matrix is None or len(rows) != 2 or len(matrix) != 2:
        return False
    columns = matrix[0] if node.op == "aten::linear.default" else matrix[1]
    if onednn.operands(node.op, node.args)[0] is not None and bias != (columns,):
        return False
    least, work = (_LEAST_SIZE, _LEAST_WORK) if mode == "fastest" else (2, 0)
    return min(*rows, columns) >= least and rows[0] * rows[1] * columns >= work


def _matrix(argument: Any, metas: Mapping[str, ValueMeta]) -> tuple[int, ...] | None:
    """Return the sizes of a tensor of float32 on processors, if they are known."""
    meta = metas.get(argument) if isinstance(argument, str) else None
    if not isinstance(meta, TensorMeta) or meta.dtype != "float32":
        return None
    sizes = tuple(size for size in meta.shape if isinstance(size, int))
    return sizes if len(sizes) == len(meta.shape) else None


def described(op: str, args: Sequence[Any]) -> str:
    """Return what products are measured once for: sizes and strides, and whether something is added."""
    bias, rows, matrix = onednn.operands(op, args)
    columns = matrix.t() if op == "aten::linear.default" else matrix
    return " ".join(("mm" if bias is None else "addmm", _layout(rows), _layout(columns)))


def _layout(matrix: torch.Tensor) -> str:
    return f"{'x'.join(map(str, matrix.shape))}@{','.join(map(str, matrix.stride()))}"


# --- measured once per process ---------------------------------------------------------------------------------

_lock = threading.Lock()
_known: dict[int, dict[str, bool]] = {}
"""By number of threads: whether oneDNN was clearly faster, by product."""
_left_s = _BUDGET_S


def faster_by_onednn(product: str, ours: Callable[[], object], torchs: Callable[[], object]) -> bool:
    """Return whether oneDNN computes `product` clearly faster than torch does otherwise; one answer per process.

    Args:
        product: sizes and layouts.
        ours: computes it by oneDNN.
        torchs: computes it as torch does.
    """
    global _left_s
    threads = torch.get_num_threads()
    with _lock:
        kept = Kept(cache_folder("products"), torch.__version__, threads)
        known = _known.get(threads)
        if known is None:
            known = _known[threads] = kept.read()
        if product not in known:
            start = time.perf_counter()
            found = clearly_faster(ours, torchs, _left_s)
            _left_s -= time.perf_counter() - start
            log.debug("product %s: oneDNN clearly faster: %s", product, found)
            known[product] = bool(found)
            if found is not None:
                kept.add(product, found)
        return known[product]
