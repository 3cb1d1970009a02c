"""What operators need beyond torch's own checks, so that no argument makes their kernels leave their memory.

Threat: a bundle calls an operator of the list with sizes, indices or lengths that its kernel trusts: the kernels of
backward passes expect those of the forward kernel, others those of the Python function around them. The kernel then
reads or writes foreign memory, or divides by zero. Defence: `guarded` checks these arguments before each call, by
shape, and by value where memory is addressed by values.

Source: torch 2.13, aten/src/ATen/native: LossCTC.cpp, Normalization.cpp, EmbeddingBag.cpp, WeightNorm.cpp,
Distance.cpp, BatchLinearAlgebra.cpp, SpectralOps.cpp, DilatedMaxPool2d.cpp, DilatedMaxPool3d.cpp; cpu/*Kernel.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.errors import CheckFailed

Arguments = Mapping[str, Any]
"""The arguments of a call by the names of the operator's schema, defaults included."""


def guarded(name: str, function: Any) -> Callable[..., Any]:
    """Return `function` with the check of its arguments before it; `function` itself if torch checks them all.

    Args:
        name: of the operator, `base.overload`.
        function: the operator's overload.
    """
    check = PRECONDITIONS.get(name, PRECONDITIONS.get(name.partition(".")[0]))
    if check is None:
        return function
    schema: Any = function._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]

    def call(*args: Any, **kwargs: Any) -> Any:
        if all(map(_has_memory, (*args, *kwargs.values()))):
            try:
                check({**defaults, **dict(zip(names, args, strict=False)), **kwargs})
            except CheckFailed as error:
                raise CheckFailed(f"operator `aten::{name}`: {error}") from None
        return function(*args, **kwargs)

    call._schema = schema  # pyright: ignore[reportFunctionMemberAccess] (as an overload has)
    return call


def _has_memory(value: Any) -> bool:
    """Return whether a kernel runs on a tensor: in a trace, and on the meta device, none does."""
    if not isinstance(value, torch.Tensor):
        return True
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


# --- of values ---------------------------------------------------------------------------------------------


def _require(condition: Any, message: str) -> None:
    """Raise `CheckFailed` unless a condition holds; on other devices than the CPU, the device checks it."""
    if isinstance(condition, torch.Tensor) and condition.device.type != "cpu":
        torch.ops.aten._assert_async.msg(condition, message)
    elif not condition:
        raise CheckFailed(message)


def _within(values: torch.Tensor, low: int, high: Any, what: str) -> None:
    """Require integers from `low` to below `high`."""
    _require(not (values.is_floating_point() or values.is_complex()), f"{what} must be integers")
    if values.numel():
        least, most = torch.aminmax(values)
        _require((least >= low) & (most < high), f"{what} must be from {low} to below {high}")


def _sizes(tensor: torch.Tensor | None, expected: Sequence[Any], what: str) -> None:
    """Require a tensor, if there is one, to have these sizes."""
    if tensor is not None:
        found = tuple(tensor.shape)
        _require(found == tuple(expected), f"{what} must have the sizes {tuple(expected)}, not {found}")


def _integers(values: Any) -> torch.Tensor:
    """Return a list of integers, or a tensor of them, as a tensor."""
    return values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.int64)


# --- of operators ------------------------------------------------------------------------------------------


def _ctc(a: Arguments) -> None:
    probabilities, targets = a["log_probs"], a["targets"]
    _require(probabilities.dim() in (2, 3), "`log_probs` must have two or three axes")
    steps, classes = probabilities.shape[0], probabilities.shape[-1]
    batch = probabilities.shape[1] if probabilities.dim() == 3 else 1
    taken, wanted = _integers(a["input_lengths"]), _integers(a["target_lengths"])
    for lengths, what in ((taken, "`input_lengths`"), (wanted, "`target_lengths`")):
        _require(lengths.numel() == batch, f"{what} must be {batch} numbers")
    _within(taken, 0, steps + 1, "`input_lengths`")
    if targets.dim() == 2:
        _require(targets.shape[0] == batch, f"`targets` must have {batch} rows")
        _within(wanted, 0, targets.shape[1] + 1, "`target_lengths`")
        places = torch.arange(targets.shape[1], device=targets.device)
        used = targets[places < wanted.reshape(batch, 1).to(targets.device)]
    else:
        _require(targets.dim() == 1, "`targets` must have one or two axes")
        _within(wanted, 0, targets.shape[0] + 1, "`target_lengths`")
        total = int(wanted.sum())
        _require(total <= targets.shape[0], "`target_lengths` must add up to the targets at most")
        used = targets[:total]
    _within(used, 0, classes, "targets")


def _ctc_backward(a: Arguments) -> None:
    _ctc(a)
    _require(a["log_probs"].dim() == 3, "`log_probs` must have three axes")
    steps, batch = a["log_probs"].shape[:2]
    _sizes(a["grad"], (batch,), "`grad`")
    _sizes(a["neg_log_likelihood"], (batch,), "`neg_log_likelihood`")
    alpha = a["log_alpha"]
    _require(alpha.dim() == 3 and tuple(alpha.shape[:2]) == (batch, steps), "`log_alpha` must be of this batch")
    _within(_integers(a["target_lengths"]), 0, (alpha.shape[2] - 1) // 2 + 1, "`target_lengths`")


def _fourier(a: Arguments) -> None:
    axes, rank, source = list(a["dim"]), a["self"].dim(), a["self"]
    _require(axes and all(0 <= axis < rank for axis in axes), f"`dim` must be axes from 0 to below {rank}")
    _require(len({*axes}) == len(axes), "`dim` must name each axis once")
    size = a.get("last_dim_size")
    if size is not None:
        _require(size >= 1, "`last_dim_size` must be positive")
        _require(source.shape[axes[-1]] >= size // 2 + 1, f"axis {axes[-1]} is too short for `last_dim_size`")


_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def _batch_norm(a: Arguments) -> None:
    source = a["input"]
    _require(source.dim() >= 2, "`input` must have two axes or more")
    channels = source.shape[1]
    for name in _OF_CHANNELS:
        # Outside of train mode the kernel gives empty tensors for what it saves, and reads none.
        if a.get(name) is not None and not (name.startswith("save_") and _is_saved_by_none(a, a[name])):
            _sizes(a[name], (channels,), f"`{name}`")
    for name in ("grad_out", "grad_output"):
        _sizes(a.get(name), source.shape, f"`{name}`")


def _is_saved_by_none(a: Arguments, saved: torch.Tensor) -> bool:
    trains = a.get("train", a.get("update", a.get("training", True)))
    return saved.numel() == 0 and not trains


def _embedding_bag(a: Arguments) -> None:
    weight, indices, offsets = a["weight"], a["indices"], a["offsets"]
    _require(weight.dim() == 2, "`weight` must have two axes")
    _bags(indices, offsets, weight.shape[0])
    _sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")


def _bags(indices: torch.Tensor, offsets: torch.Tensor, rows: Any) -> None:
    for values, what in ((indices, "`indices`"), (offsets, "`offsets`")):
        _require(values.dim() == 1, f"{what} must have one axis")
        _require(values.dtype in (torch.int32, torch.int64), f"{what} must be of dtype int32 or int64")
    _within(indices, 0, rows, "`indices`")
    _within(offsets, 0, indices.shape[0] + 1, "`offsets`")
    if offsets.shape[0]:
        _require((offsets[:1] == 0).all() & (offsets[1:] >= offsets[:-1]).all(), "`offsets` must rise from 0")


def _embedding_bag_backward(a: Arguments) -> None:
    grad, indices, rows = a["grad"], a["indices"], a.get("num_weights")
    _require(grad.dim() == 2, "`grad` must have two axes")
    rows = a["weight"].shape[0] if rows is None else rows
    _within(indices, 0, rows, "`indices`")
    _require(indices.dim() == 1, "`indices` must have one axis")
    if a["offset2bag"].numel() or a.get("offsets") is None:
        _sizes(a["offset2bag"], indices.shape, "`offset2bag`")
    _within(a["offset2bag"], 0, grad.shape[0], "`offset2bag`")
    if a.get("offsets") is not None:
        _bags(indices, a["offsets"], rows)
    if a.get("bag_size") is not None and a["bag_size"].numel():
        _require(a["bag_size"].numel() >= grad.shape[0], "`bag_size` must be a number per bag")
    if a["mode"] == _MAX and a.get("maximum_indices") is not None:
        _sizes(a["maximum_indices"], grad.shape, "`maximum_indices`")
        _within(a["maximum_indices"], -1, rows, "`maximum_indices`")
    _sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")


_MAX = 2
"""The mode of embedding bags that takes the greatest value."""


def _weight_norm(a: Arguments) -> None:
    direction, norms, axis = (a.get(f"{name}", a.get(f"saved_{name}")) for name in ("v", "g", "dim"))
    rank = direction.dim()
    _require(0 <= axis < rank, f"`dim` must be from 0 to below {rank}")
    size = direction.shape[axis]
    _require(norms.numel() == size, f"`g` must be {size} numbers")
    _require(norms.dtype == direction.dtype, "`g` must be of the dtype of `v`")
    for name in ("saved_norms", "grad_w"):
        if a.get(name) is not None:
            expected = size if name == "saved_norms" else direction.numel()
            _require(a[name].numel() == expected, f"`{name}` must be {expected} numbers")


def _pairs(a: Arguments) -> None:
    rows = a["self"]
    _require(rows.dim() == 2, "`self` must have two axes")
    count = rows.shape[0] * (rows.shape[0] - 1) // 2
    for name in ("grad", "pdist"):
        _sizes(a.get(name), (count,), f"`{name}`")
    _require(rows.is_contiguous(), "`self` must be contiguous")


def _pivots(name: str) -> Callable[[Arguments], None]:
    def check(a: Arguments) -> None:
        matrix, pivots = (a["LU_data"], a["LU_pivots"]) if name == "lu" else (a["LD"], a["pivots"])
        _require(matrix.dim() >= 2, "the matrix must have two axes or more")
        rows, count = matrix.shape[-2], min(matrix.shape[-2:])
        _require(pivots.dtype == torch.int32, "pivots must be of dtype int32")
        _sizes(pivots, (*matrix.shape[:-2], count), "pivots")
        _within(pivots if name == "lu" else pivots.abs(), 1, rows + 1, "pivots")

    return check


def _pool_backward(axes: int) -> Callable[[Arguments], None]:
    def check(a: Arguments) -> None:
        grad, source, indices = a["grad_output"], a["self"], a["indices"]
        _require(source.dim() in (axes + 1, axes + 2), f"`self` must have {axes + 1} or {axes + 2} axes")
        _sizes(grad, (*source.shape[:-axes], *grad.shape[-axes:]), "`grad_output`")
        _sizes(indices, grad.shape, "`indices`")
        _require(indices.dtype == torch.int64, "`indices` must be of dtype int64")
        _within(indices, 0, math.prod(source.shape[-axes:]), "`indices`")

    return check


def _least_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return where integers are the least of their dtype, whose negative the dtype lacks."""
    return tensor == torch.iinfo(tensor.dtype).min


def _are_integers(*values: Any) -> bool:
    return all(
        not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if isinstance(value, torch.Tensor)
        else isinstance(value, int)
        for value in values
    )


def _common_multiple(a: Arguments) -> None:
    for name in ("self", "other"):
        if _are_integers(a[name]):
            _require(~_least_of(a[name]).any(), f"`{name}` must not hold the least number of its dtype")


def _truncated(a: Arguments) -> None:
    numbers, other = a["self"], a["other"]
    if a.get("rounding_mode") == "trunc" and _are_integers(numbers, other):
        # Processors end the process then.
        _require(~(_least_of(numbers) & (other == -1)).any(), "the least number of a dtype cannot be divided by -1")


PRECONDITIONS: dict[str, Callable[[Arguments], None]] = {
    **dict.fromkeys(("ctc_loss", "_ctc_loss"), _ctc),
    "_ctc_loss_backward": _ctc_backward,
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _fourier),
    **dict.fromkeys(
        (
            *("native_batch_norm", "native_batch_norm_backward", "batch_norm_backward", "_batch_norm_no_update"),
            *("_batch_norm_with_update", "_batch_norm_with_update_functional", "_native_batch_norm_legit"),
            *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "cudnn_batch_norm_backward"),
        ),
        _batch_norm,
    ),
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _embedding_bag),
    **dict.fromkeys(
        (
            *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
            "_embedding_bag_per_sample_weights_backward",
        ),
        _embedding_bag_backward,
    ),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface", "_weight_norm_interface_backward"), _weight_norm),
    **dict.fromkeys(("_pdist_forward", "_pdist_backward"), _pairs),
    "lu_unpack": _pivots("lu"),
    "linalg_ldl_solve": _pivots("ldl"),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
        _pool_backward(2),
    ),
    **dict.fromkeys(
        ("max_pool3d_with_indices_backward", "adaptive_max_pool3d_backward", "fractional_max_pool3d_backward"),
        _pool_backward(3),
    ),
    **dict.fromkeys(("lcm", "lcm_"), _common_multiple),
    **dict.fromkeys(
        (f"{base}.{other}_mode" for base in ("div", "div_", "divide", "divide_") for other in ("Tensor", "Scalar")),
        _truncated,
    ),
    "div.out_mode": _truncated,
}
"""What to check before an operator runs, by its base name for all overloads, or by its full name."""
