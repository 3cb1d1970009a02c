"""What operators need beyond torch's own checks, so that no argument makes their kernels leave their memory.

Kernels trust sizes, indices and lengths; `guarded` checks them before each call, by value where values address memory.
Source: torch 2.13, aten/src/ATen/native and cpu/*Kernel.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.execution.preconditions import layers, mathematics
from aotexport_runtime.execution.preconditions.require import (
    OPERATOR,
    PRECONDITIONS,
    WRITTEN,
    Arguments,
    Check,
    before,
    is_recorded,
    require,
    spacious,
)


def guarded(name: str, function: Any) -> Callable[..., Any]:
    """Return an operator with the check of its arguments before it, or with zeros in what it leaves as it found it.

    It is `function`, its overload, if torch checks all arguments, and writes all results. `name`: `base.overload`.
    """
    if name in FRESH:
        return _with_schema(lambda *args, **kwargs: function(*args, **kwargs).zero_(), function)
    if name in GROWING:
        return _with_schema(_grown(function), function)
    if name == "set_data.default":
        return _with_schema(_moved(function), function)
    schema: Any = function._schema
    base, check = name.partition(".")[0], _check_of(name, schema)
    places = (
        () if name in _BY_ELEMENT else [item.name for item in schema.arguments if item.kwarg_only and item.is_write]
    )
    keeps = base in KEPT
    if check is None and not places and not keeps:
        return function
    complete = WRITTEN.get(base)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    defaults[OPERATOR] = name
    # By their names in the operator set: a release may have others.
    signature = signature_of(aten_signatures()[name])
    assert signature is not None
    names = [parameter.name for parameter in signature.positional]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not all(map(_has_memory, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        kept = keeps and is_recorded(arguments)
        if kept:
            args, kwargs = _own(args), {key: _own(value) for key, value in kwargs.items()}
            arguments |= {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            if check is not None:
                check(arguments)
            for place in places:
                given = kwargs[place]
                for tensor in given if isinstance(given, list | tuple) else [given]:
                    spacious({place: tensor}, place)
        except CheckFailed as error:
            raise CheckFailed(f"operator `aten::{name}`: {error}") from None
        results = function(*args, **kwargs)
        for place in places:
            # Not every kernel tells that it has resized this tensor (`kron.out`).
            increment_version(kwargs[place])
        if complete is not None:
            complete(arguments, results)
        return _own(results) if kept else results

    return _with_schema(call, function)


def _check_of(name: str, schema: Any) -> Check | None:
    base = name.partition(".")[0]
    found = PRECONDITIONS.get(name, PRECONDITIONS.get(base))
    if found is None and base.startswith("_foreach_"):
        return mathematics.lists
    if found is None and any(argument.name == "reduction" for argument in schema.arguments):
        return layers.reduction
    return found


def _with_schema(call: Callable[..., Any], function: Any) -> Callable[..., Any]:
    call._schema = function._schema  # pyrefly: ignore[missing-attribute] (as an overload has)
    return call


def _has_memory(value: Any) -> bool:
    """Return whether a kernel runs on a tensor: in a trace, and on the meta device, none does."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return not value.is_meta
    return not isinstance(value, torch.Tensor)


_BY_ELEMENT = frozenset(
    ("where.self_out", *(f"{base}_backward.grad_input" for base in ("gelu", "sigmoid", "silu", "tanh", "threshold")))
)
"""Operators into a given tensor that engines call for themselves; their kernels check it."""

KEPT = frozenset(
    (
        *("_ctc_loss", "ctc_loss", "embedding", "embedding_bag", "_embedding_bag", "multi_margin_loss"),
        *("multilabel_margin_loss", "multilabel_margin_loss_forward", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        *("nll_loss_forward", "nll_loss2d", "nll_loss2d_forward", "_grouped_mm"),
        *(f"max_pool{axes}d_with_indices" for axes in (1, 2, 3)),
        *(f"adaptive_max_pool{axes}d" for axes in (1, 2, 3)),
        *(f"fractional_max_pool{axes}d" for axes in (2, 3)),
    )
)
"""Operators whose backward trusts integers that autograd has saved, by base name.

Where autograd records them they take copies of integers and masks, and give copies: nothing of a graph reaches what was
checked and saved. Version counters do not tell of every change: `set_data`, `unsafe_split` and their kin make aliases
with counters of their own, and batch norm raises none.
"""

# --- memory as it is found, with what other tensors have left there, or of other tensors ---------------------

_LIKE = ("empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

FRESH = frozenset(
    (
        *("empty.memory_format", "_make_dep_token.default"),
        *(f"{name}.default" for name in _LIKE),
        *(f"{name}.out" for name in _LIKE),
    )
)
"""Operators whose results nobody has written; with `out` they copy such a result to it."""

GROWING = frozenset(("empty.out", "resize_.default", "resize_as_.default"))
"""Operators that may give a tensor more memory, which nobody has written."""


def _grown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives zeros where an operator of `GROWING` gives any bytes beside the tensor's own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = kwargs.get("out", args[0])
        before = tensor.untyped_storage().nbytes()
        result = function(*args, **kwargs)
        storage = tensor.untyped_storage()
        if storage.nbytes() > before and storage.device.type != "meta":
            place = torch.empty(0, dtype=torch.uint8, device=storage.device)
            place.set_(storage, before, (storage.nbytes() - before,), (1,)).zero_()
        return result

    return call


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `set_data`, after which a tensor of other sizes has another version: autograd keeps tensors, not sizes."""

    def call(tensor: torch.Tensor, new_data: torch.Tensor) -> None:
        before = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        function(tensor, new_data)
        if before != (tensor.shape, tensor.stride(), tensor.dtype, tensor.device):
            increment_version(tensor)

    return call


def _own(value: Any) -> Any:
    """Return an argument or a result with copies of its tensors of integers and of masks."""
    if isinstance(value, list | tuple):
        return tuple(map(_own, value)) if isinstance(value, tuple) else [*map(_own, value)]
    is_own = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.clone() if is_own else value


@before("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
def _strided(a: Arguments) -> None:
    """Check that the place of a view's last element is a number that kernels compute with."""
    last = (a["storage_offset"] or 0) + sum(size * step for size, step in zip(a["size"], a["stride"], strict=False))
    require(last < 1 << 56, "`size` and `stride` must lie in the memory of `self`")


@before("set_.source_Tensor", "set_.source_Tensor_storage_offset")
def _same_dtype(a: Arguments) -> None:
    """Check that a tensor takes the memory of one with elements of the same size."""
    require(a["self"].dtype == a["source"].dtype, "`source` must be of the dtype of `self`")
    if "size" in a:
        shape, stride, offset = a["size"], a["stride"], a["storage_offset"]
        steps = list(stride) if stride else list(torch.empty(shape, device="meta").stride())
        require(
            len(steps) == len(shape) and min((offset, *shape, *steps)) >= 0, "`size` and `stride` must fit together"
        )
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        source = a["source"]
        held = source.untyped_storage().nbytes() // source.element_size() - source.storage_offset()
        require(0 in shape or last < held, "the tensor must lie in the memory of `source`")
