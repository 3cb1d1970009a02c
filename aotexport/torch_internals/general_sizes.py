"""Sizes in traces: let torch assume little about them, and tell what it assumes; undone when a block ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import _debug_has_internal_overlap as internal_overlap  # type: ignore[attr-defined]
from torch import _refs
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._library.fake_impl import FakeImplCtx
from torch._prims_common import (
    extract_shape_from_varargs,
    infer_size,
    is_contiguous_or_false,
    make_contiguous_strides_for,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotexport.process.patches import Patch, patched


def fixed_symbols(
    shape_env: ShapeEnv, seen: Callable[[Any, bool], None], line: Callable[[], str]
) -> contextlib.AbstractContextManager[None]:
    """Call `seen` with each symbol that a shape environment fixes to a number, and whether something asked for it.

    `line` returns the user's running line, which guards record, see `line_of`.
    """
    replace = shape_env._set_replacement

    def watched(symbol: sympy.Symbol, value: sympy.Expr, reason: str) -> None:
        if value.is_number:
            seen(symbol, _is_asked())
        replace(symbol, value, reason)

    return patched(
        Patch(shape_env, "_set_replacement", watched, "Record the line that holds a size to a number"),
        Patch(
            shape_env,
            "_get_sloc",
            lambda framework_loc=None: SLoc(framework_loc, line()),
            "Keep the line of the user's that makes a guard",
        ),
    )


def _is_asked() -> bool:
    """Return whether a symbolic number is being turned into a number, not compared."""
    codes = {frame.f_code for frame, _ in traceback.walk_stack(None)}
    return not codes.isdisjoint((SymNode.guard_int.__code__, SymNode.guard_float.__code__))


def _asks_for_zero_or_one(condition: sympy.Basic) -> bool:
    special = (0, 1) if isinstance(condition, sympy.Eq | sympy.Ne) else (0, 1, 2)
    return isinstance(condition, sympy.core.relational.Relational) and any(side in special for side in condition.args)


def zero_and_one_symbolic(*, symbolic: bool) -> contextlib.AbstractContextManager[None]:
    """Give dynamic sizes a symbol even if the example's is 0 or 1, values that torch would specialise on."""
    return shape_config.patch(backed_size_oblivious=symbolic)  # type: ignore[attr-defined]


def general_sizes_kept(assumed: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Let torch take its general path if that is right for all sizes, instead of guarding on the example's.

    Torch's operators ask whether a size is 0 or 1, or a layout contiguous, with an answer that is always right as
    default (`guard_or_false`, `guard_or_true`); for sizes that have an example value they guard on it nevertheless.
    Here they guard only if the example takes a special path, but not because a size of it happens to be 0 or 1.

    `assumed` is called with each condition that a trace assumed without a guard. Operators are right without it; the
    layouts and aliases of a trace may differ.
    """
    original = symbolic_shapes._guard_or
    reshapes = _Reshapes()

    def general(condition: Any, default: bool) -> bool:
        if reshapes.squeezing or not isinstance(condition, torch.SymBool) or not condition.node.has_hint():
            return original(condition, default)
        expression = condition.node.expr
        free = reshapes.running or _asks_for_zero_or_one(expression)
        if bool(condition.node.hint) is not default and not free:
            return original(condition, default)
        known = symbolic_shapes._static_eval_sym_bool(condition)
        if known is None:
            assumed(expression if default else sympy.Not(expression))
            return default
        return known

    reason = "Take torch's general path where it is right for all sizes"
    return patched(
        Patch(symbolic_shapes, "_guard_or", general, reason),
        Patch(torch, "_debug_has_internal_overlap", _overlap(internal_overlap), reason),
        *reshapes.patches(general),
    )


class _Reshapes:
    """Lets reshapes copy where not all sizes let them be views, and views of contiguous tensors ask for no sizes.

    A view holds a size to 1 where its axis must go (`squeezing`).

    Source: torch 2.13, `torch/_refs/__init__.py`, `_reshape_view_helper`; `aten/src/ATen/TensorUtils.cpp`,
    `computeStride`.
    """

    OPERATORS = (torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints)

    def __init__(self) -> None:
        self.running = self.viewing = self.squeezing = False

    def patches(self, general: Callable[[Any, bool], bool]) -> list[Patch]:
        """Return the patches; `general` answers a condition with its default, see `general_sizes_kept`."""
        view, call, guard = _refs._reshape_view_helper, proxy_tensor.proxy_call, SymNode.guard_bool
        drop = _refs.squeeze

        def guard_bool(node: Any, file: str, line: int) -> bool:
            if self.running and isinstance(node.expr, sympy.Eq | sympy.Ne) and 1 in node.expr.args:
                return general(torch.SymBool(node), isinstance(node.expr, sympy.Ne))
            return guard(node, file, line)

        def proxy_call(mode: Any, func: Any, *args: Any) -> Any:
            with self._set(running=self.running or func in self.OPERATORS):
                return call(mode, func, *args)

        def reshape_view_helper(tensor: torch.Tensor, *shape: Any, allow_copy: bool) -> torch.Tensor:
            with self._set(running=False, viewing=True):
                if not is_contiguous_or_false(tensor):
                    return view(tensor, *shape, allow_copy=allow_copy)
                sizes = infer_size(extract_shape_from_varargs(shape, validate=False), tensor.numel())
                return tensor.as_strided(sizes, make_contiguous_strides_for(sizes))

        def squeeze(tensor: torch.Tensor, dim: Any = None) -> torch.Tensor:
            found = drop(tensor, dim)
            if not self.viewing or found.ndim < tensor.ndim:
                return found
            # Torch tries again until the axis is gone.
            with self._set(squeezing=True):
                return drop(tensor, dim)

        reason = "Hold no sizes of reshapes to other numbers than 1"
        return [
            Patch(SymNode, "guard_bool", guard_bool, reason),
            Patch(proxy_tensor, "proxy_call", proxy_call, reason),
            Patch(_refs, "_reshape_view_helper", reshape_view_helper, reason),
            Patch(
                _refs, "squeeze", squeeze, "Hold a size to 1 where a view drops its axis, which torch retries for ever"
            ),
        ]

    @contextlib.contextmanager
    def _set(self, **values: bool) -> Iterator[None]:
        before = dict(vars(self))
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


def symbolic_fake(mode: FakeTensorMode, tensor: torch.Tensor, dynamic: Sequence[bool], name: str) -> torch.Tensor:
    """Return the fake of a contiguous tensor, with a symbol for each size that is `dynamic`, per axis.

    No other tensor of the mode has the name.
    """
    kinds = [DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC for is_dynamic in dynamic]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is known to be laid out row by row without gaps."""
    expected: Any = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not symbolic_shapes.statically_known_true(step == expected):
            return False
        expected = expected * size
    return True


def _is(size: Any, value: int) -> bool:
    return isinstance(size, int) and size == value


def _overlap(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """Return whether elements share memory (1), as writes ask, or may (2), without asking whether they are dense."""

    def overlap(tensor: torch.Tensor) -> int:
        sizes = (*tensor.shape, *tensor.stride())
        if all(isinstance(size, int) for size in sizes):
            return original(tensor)
        expanded = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if _is(stride, 0)]
        return 2 if all(_is(size, 1) for size in expanded) else 1

    return overlap


def sizes_from_zero() -> Patch:
    """Return a patch that lets fake kernels make results with no or one element by torch's old name for sizes of data.

    `create_unbacked_symint` has a minimum of 2, so that `nms` of torchvision would refuse images with one object.
    """

    def create_unbacked_symint(context: FakeImplCtx, *, min: int = 0, max: int | None = None) -> torch.SymInt:
        return context.new_dynamic_size(min=min, max=max)

    return Patch(FakeImplCtx, "create_unbacked_symint", create_unbacked_symint, "Let results have 0 or 1 elements")


class _ClassOfC(UserDict[str, Any]):
    """The attributes of a class written in C, which Python does not let one set, for a patch."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
        # The dict that the class's read-only `__dict__` shows.
        self.data = gc.get_referents(vars(owner))[0]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        # Python caches what it found in classes.
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self._owner))


def counts_kept() -> Patch:
    """Return a patch that lets `Size.numel` keep symbolic sizes: torch 2.13 asks each for its number."""
    original = torch.Size.numel

    def numel(self: torch.Size) -> Any:
        return original(self) if all(type(size) is int for size in self) else math.prod(self)

    return Patch(_ClassOfC(torch.Size), "numel", numel, "Keep the number of elements of a size symbolic")
