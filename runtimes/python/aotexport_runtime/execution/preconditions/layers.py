"""Layers of networks: normalization, sequences, attention, embeddings, losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from aotexport_runtime.execution.autocast import autocast_dtype
from aotexport_runtime.execution.preconditions.require import (
    Arguments,
    after,
    before,
    contiguous,
    integers,
    is_recorded,
    require,
    sizes,
    spacious,
    within,
)

_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")

_MEAN, _MAX = 1, 2
"""Modes of embedding bags."""


@before(
    *("native_batch_norm", "native_batch_norm_backward", "batch_norm_backward", "_batch_norm_with_update"),
    *("_batch_norm_with_update_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "cudnn_batch_norm", "cudnn_batch_norm_backward"),
)
def _batch_norm(a: Arguments) -> None:
    source = a["input"]
    require(source.dim() >= 2, "`input` must have two axes or more")
    channels, trains = (source.shape[1],), _trains(a)
    for name in _OF_CHANNELS:
        given = a.get(name)
        if given is not None and given.shape != channels:
            # Outside of train mode the kernel gives empty tensors for what it saves, and reads none.
            require(
                name.startswith("save_") and given.numel() == 0 and not trains,
                f"`{name}` must have the sizes {channels}, not {tuple(given.shape)}",
            )
    if not trains and "running_mean" in a:
        given = a["running_mean"] is not None and a["running_var"] is not None
        require(given, "`running_mean` and `running_var` must be given")
        # Backward reads a copy in order after it has freed it.
        for name in ("running_mean", "running_var"):
            contiguous(a[name], f"`{name}`")
    for name in ("grad_out", "grad_output"):
        sizes(a.get(name), source.shape, f"`{name}`")
    if trains:
        saved = [name for name in _OF_CHANNELS if name.startswith("save_") and name in a]
        require(all(a[name] is not None for name in saved), "what the forward kernel saved must be given")


def _trains(a: Arguments) -> bool:
    return a.get("train", a.get("update", a.get("training", True)))


@before("_batch_norm_no_update")
def _batch_norm_without_update(a: Arguments) -> None:
    _batch_norm({**a, "training": False})


@before("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out")
def _batch_norm_without_statistics(a: Arguments) -> None:
    require(a["training"], "without running statistics `training` must be true")
    _batch_norm(a)


@before("native_group_norm")
def _group_norm(a: Arguments) -> None:
    # From 2.14 torch gives memory that nobody has written for an `N` of 0.
    require(a["input"].numel() == a["N"] * a["C"] * a["HxW"], "`input` must have `N * C * HxW` elements")
    for name in ("weight", "bias"):
        spacious(a[name], f"`{name}`")


@before("native_group_norm_backward")
def _group_norm_backward(a: Arguments) -> None:
    require(a["group"] >= 1 and a["C"] % a["group"] == 0, "`C` must be a multiple of `group`")
    sizes(a["grad_out"], a["input"].shape, "`grad_out`")
    for name in ("grad_out", "input", "mean", "rstd", "weight"):
        spacious(a[name], f"`{name}`")


@before("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(a: Arguments) -> None:
    source, axes = a["input"], len(a["normalized_shape"])
    sizes(a["grad_out"], source.shape, "`grad_out`")
    rows = math.prod(source.shape[: source.dim() - axes])
    for name in ("mean", "rstd"):
        if name in a:
            require(a[name].numel() == rows, f"`{name}` must be {rows} numbers")
            spacious(a[name], f"`{name}`")


@before("_weight_norm")
def _weight_norm(a: Arguments) -> None:
    direction, norms, axis = (a.get(f"{name}", a.get(f"saved_{name}")) for name in ("v", "g", "dim"))
    rank = direction.dim()
    require(0 <= axis < rank, f"`dim` must be from 0 to below {rank}")
    size = direction.shape[axis]
    require(direction.numel() > 0, "`v` must not be empty")
    require(norms.numel() == size, f"`g` must be {size} numbers")
    require(norms.dtype == direction.dtype, "`g` must be of the dtype of `v`")
    for name in ("saved_norms", "grad_w"):
        if a.get(name) is not None:
            expected = size if name == "saved_norms" else direction.numel()
            require(a[name].numel() == expected, f"`{name}` must be {expected} numbers")


@before("_weight_norm_interface", "_weight_norm_interface_backward")
def _fused_weight_norm(a: Arguments) -> None:
    _weight_norm(a)
    for name in ("v", "g", "grad_w", "saved_v", "saved_g", "saved_norms"):
        contiguous(a.get(name), f"`{name}`")


@before("ctc_loss", "_ctc_loss")
def _ctc(a: Arguments) -> None:
    probabilities, targets = a["log_probs"], a["targets"]
    require(probabilities.dim() in (2, 3), "`log_probs` must have two or three axes")
    steps, classes = probabilities.shape[0], probabilities.shape[-1]
    batch = probabilities.shape[1] if probabilities.dim() == 3 else 1
    require(0 <= a["blank"] < classes, f"`blank` must be from 0 to below {classes}")
    taken, wanted = integers(a["input_lengths"]), integers(a["target_lengths"])
    for lengths, what in ((taken, "`input_lengths`"), (wanted, "`target_lengths`")):
        require(lengths.numel() == batch, f"{what} must be {batch} numbers")
    within(taken, 0, steps + 1, "`input_lengths`")
    if targets.dim() == 2:
        require(targets.shape[0] == batch, f"`targets` must have {batch} rows")
        within(wanted, 0, targets.shape[1] + 1, "`target_lengths`")
        places = torch.arange(targets.shape[1], device=targets.device)
        used = targets[places < wanted.reshape(batch, 1).to(targets.device)]
    else:
        require(targets.dim() == 1, "`targets` must have one or two axes")
        within(wanted, 0, targets.shape[0] + 1, "`target_lengths`")
        total = int(wanted.sum())
        require(total <= targets.shape[0], "`target_lengths` must add up to the targets at most")
        used = targets[:total]
    within(used, 0, classes, "targets")


@after("_ctc_loss")
def _ctc_written(a: Arguments, results: Sequence[torch.Tensor]) -> None:
    """Write what the kernel leaves of its table: steps beyond an input, and places beyond its targets."""
    alpha = results[1].data  # has a version of its own: autograd has kept this tensor
    taken, wanted = (integers(a[name]).to(alpha.device) for name in ("input_lengths", "target_lengths"))
    steps, places = (torch.arange(size, device=alpha.device) for size in alpha.shape[1:])
    beyond = (steps >= taken.reshape(-1, 1))[:, :, None] | (places > 2 * wanted.reshape(-1, 1))[:, None]
    alpha.masked_fill_(beyond, -math.inf)


@before("_ctc_loss_backward")
def _ctc_backward(a: Arguments) -> None:
    _ctc(a)
    require(a["log_probs"].dim() == 3, "`log_probs` must have three axes")
    steps, batch = a["log_probs"].shape[:2]
    sizes(a["grad"], (batch,), "`grad`")
    sizes(a["neg_log_likelihood"], (batch,), "`neg_log_likelihood`")
    alpha = a["log_alpha"]
    require(alpha.dim() == 3 and tuple(alpha.shape[:2]) == (batch, steps), "`log_alpha` must be of this batch")
    within(integers(a["target_lengths"]), 0, (alpha.shape[2] - 1) // 2 + 1, "`target_lengths`")


@before("gru_cell")
def _cell(a: Arguments) -> None:
    rows = 3 * a["hx"].shape[-1]
    for name in ("w_ih", "w_hh"):
        require(a[name].shape[0] == rows, f"`{name}` must have {rows} rows")


@before("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(a: Arguments) -> None:
    packed = "batch_sizes" in a
    source = a["data"] if packed else a["input"]
    states = list(a["hx"]) if isinstance(a["hx"], list | tuple) else [a["hx"]]
    directions = 2 if a["bidirectional"] else 1
    require(source.dim() == (2 if packed else 3), "the input must have as many axes as the layers take")
    require(1 <= a["num_layers"] <= len(a["params"]), "`num_layers` must be that of `params`")
    layers = a["num_layers"] * directions
    for state in states:
        require(state.dim() == 3 and state.shape[0] == layers, f"`hx` must have three axes, the first of size {layers}")
    projected = len(states) == 2 and states[0].shape[2] != states[1].shape[2]
    count = layers * (2 + 2 * a["has_biases"] + projected)
    require(len(a["params"]) == count, f"`params` must be {count} tensors")
    _weights(a, source.shape[-1], states, projected=projected)
    kinds = {tensor.dtype for tensor in (source, *states, *a["params"])}
    # Autocast gives the kernels one dtype of them.
    cast = autocast_dtype(source.device.type) is not None and torch.float64 not in kinds
    is_one = all(kind.is_floating_point for kind in kinds) and (len(kinds) == 1 or cast)
    require(is_one, "all tensors must be of one floating dtype")
    if packed:
        sizes_of_steps = a["batch_sizes"]
        _steps(sizes_of_steps, source)
        batch = int(sizes_of_steps.max()) if sizes_of_steps.numel() else 0
    else:
        batch = source.shape[0 if a["batch_first"] else 1]
    for state in states:
        require(state.shape[1] == batch, f"`hx` must be of a batch of {batch}")


def _steps(batch_sizes: torch.Tensor, data: torch.Tensor) -> None:
    require(batch_sizes.dim() == 1 and batch_sizes.dtype == torch.int64, "`batch_sizes` must be a row of int64")
    within(batch_sizes, 1, data.shape[0] + 1, "`batch_sizes`")
    require((batch_sizes[1:] <= batch_sizes[:-1]).all(), "`batch_sizes` must not rise")
    require(batch_sizes.sum() == data.shape[0], "`batch_sizes` must add up to the rows of `data`")


@before("_pad_packed_sequence")
def _unpacked(a: Arguments) -> None:
    require(a["data"].dim() >= 1, "`data` must have rows")
    _steps(a["batch_sizes"], a["data"])


def _weights(a: Arguments, width: int, states: list[torch.Tensor], *, projected: bool) -> None:
    """Check the sizes of the weights of every layer, which take `width` numbers a step."""
    directions = 2 if a["bidirectional"] else 1
    given = iter(a["params"])
    hidden, returned = states[-1].shape[2], states[0].shape[2]
    rows = 4 * hidden if len(states) == 2 else a["params"][0].shape[0]
    for layer in range(a["num_layers"]):
        expected = [(rows, width if layer == 0 else directions * returned), (rows, returned)]
        expected += [(rows,)] * 2 * a["has_biases"] + [(returned, hidden)] * projected
        for shape in expected * directions:
            sizes(next(given), shape, "a tensor of `params`")


@before("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def _attention(a: Arguments) -> None:
    query, key, value = a["query"], a["key"], a["value"]
    require(key.dim() < 2 or key.shape[-2:-1] == value.shape[-2:-1], "`key` and `value` must have as many steps")
    if a["enable_gqa"]:
        require(min(query.dim(), key.dim(), value.dim()) >= 3, "`query`, `key` and `value` must have heads")
        for name, heads in (("key", key.shape[-3]), ("value", value.shape[-3])):
            require(
                heads > 0 and query.shape[-3] % heads == 0, f"the heads of `query` must be those of `{name}`, repeated"
            )


@before("_scaled_dot_product_flash_attention_for_cpu")
def _flash_attention(a: Arguments) -> None:
    query, key, value = a["query"], a["key"], a["value"]
    for tensor in (query, key, value):
        require(tensor.dim() == 4 and tensor.dtype == query.dtype, "all tensors must have four axes and one dtype")
    _rows(query, key, value)
    require(0 not in (*query.shape[1:], *key.shape[1:3]), "`query` and `key` must have heads, steps and an embedding")
    batch, heads, _, depth = query.shape
    sizes(key, (batch, key.shape[1], key.shape[2], depth), "`key`")
    sizes(value, (batch, key.shape[1], key.shape[2], value.shape[3]), "`value`")
    require(heads % key.shape[1] == 0, "the heads of `query` must be those of `key`, repeated")


def _rows(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        in_order = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel()
        require(in_order, "the numbers of a step must lie one after the other")


@before("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_attention_backward(a: Arguments) -> None:
    _flash_attention(a)
    query, value, out, grad = (a[name] for name in ("query", "value", "out", "grad_out"))
    require(out.dtype == grad.dtype == query.dtype, "all tensors must have four axes and one dtype")
    batch, heads, steps, _ = query.shape
    _rows(out)
    sizes(out, (batch, heads, steps, value.shape[3]), "`out`")
    sizes(grad, out.shape, "`grad_out`")
    sizes(a["logsumexp"], (batch, heads, steps), "`logsumexp`")


@before("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(a: Arguments) -> None:
    weight, indices, offsets = a["weight"], a["indices"], a["offsets"]
    require(weight.dim() == 2, "`weight` must have two axes")
    _mode(a)
    _bags(indices, offsets, weight.shape[0])
    sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")
    if a["include_last_offset"] and offsets.shape[0] and is_recorded(a):
        require((offsets[-1:] == indices.shape[0]).all(), "with gradients the last of `offsets` must be the end")


def _mode(a: Arguments) -> None:
    # torch 2.7 takes another one and reads outside.
    require(0 <= a["mode"] <= _MAX, "`mode` must be from 0 to 2")


def _bags(indices: torch.Tensor, offsets: torch.Tensor, rows: Any) -> None:
    contiguous(offsets, "`offsets`")
    for values, what in ((indices, "`indices`"), (offsets, "`offsets`")):
        require(values.dim() == 1, f"{what} must have one axis")
        require(values.dtype in (torch.int32, torch.int64), f"{what} must be of dtype int32 or int64")
    within(indices, 0, rows, "`indices`")
    within(offsets, 0, indices.shape[0] + 1, "`offsets`")
    require(offsets.shape[0] or not indices.shape[0], "`offsets` must not be empty")
    if offsets.shape[0]:
        require((offsets[:1] == 0).all() & (offsets[1:] >= offsets[:-1]).all(), "`offsets` must rise from 0")


@before("_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward")
def _embedding_bag_backward(a: Arguments) -> None:
    grad, indices, rows = a["grad"], a["indices"], a.get("num_weights")
    require(grad.dim() == 2, "`grad` must have two axes")
    _mode(a)
    rows = a["weight"].shape[0] if rows is None else rows
    within(indices, 0, rows, "`indices`")
    require(indices.dim() == 1, "`indices` must have one axis")
    if a["offset2bag"].numel() or a.get("offsets") is None:
        sizes(a["offset2bag"], indices.shape, "`offset2bag`")
    within(a["offset2bag"], 0, grad.shape[0], "`offset2bag`")
    if a.get("offsets") is not None:
        _bags(indices, a["offsets"], rows)
        bags = (a["offsets"] < indices.shape[0]).sum()
        require(bags <= grad.shape[0], "`grad` must have a row per bag")
    if a.get("bag_size") is not None and (a["bag_size"].numel() or (a["mode"] == _MEAN and a.get("offsets") is None)):
        require(a["bag_size"].numel() >= grad.shape[0], "`bag_size` must be a number per bag")
    for name in ("offset2bag", "bag_size", "maximum_indices"):
        contiguous(a.get(name), f"`{name}`")
    if a["mode"] == _MAX and a.get("maximum_indices") is not None:
        sizes(a["maximum_indices"], grad.shape, "`maximum_indices`")
        within(a["maximum_indices"], -1, rows, "`maximum_indices`")
    sizes(a.get("per_sample_weights"), indices.shape, "`per_sample_weights`")


@before("embedding_dense_backward")
def _embedding_backward(a: Arguments) -> None:
    grad, indices, rows = a["grad_output"], a["indices"], a["num_weights"]
    require(grad.dim() >= 1, "`grad_output` must have an axis")
    sizes(grad, (*indices.shape, grad.shape[-1]), "`grad_output`")
    within(indices, 0, rows, "`indices`")


def reduction(a: Arguments) -> None:
    """Check how a loss is reduced: by another number no kernel writes a result."""
    require(a["reduction"] in (0, 1, 2), "`reduction` must be 0, 1 or 2")


@before("multilabel_margin_loss", "multilabel_margin_loss_forward")
def _margins(a: Arguments) -> None:
    """Check that there is a sample: of none, no kernel writes a reduced loss."""
    reduction(a)
    require(a["reduction"] == 0 or a["self"].numel() > 0, "`self` must not be empty")


@before("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margins_backward(a: Arguments) -> None:
    reduction(a)
    source, count = a["self"], a["grad_output"].numel()
    require(count > 0 or source.numel() == 0, "`grad_output` must not be empty")
    if a["reduction"] == 0:
        samples = source.shape[0] if source.dim() > 1 else 1
        require(count == samples, f"`grad_output` must be {samples} numbers")


@before("nll_loss_backward", "nll_loss2d_backward")
def _classes_backward(a: Arguments) -> None:
    reduction(a)
    source, target = a["self"], a["target"]
    if a["reduction"] == 0 and source.dim() > 1:
        named = torch.where(target == a["ignore_index"], 0, target)
        within(named, 0, source.shape[1], "`target`, but for `ignore_index`,")


@before("binary_cross_entropy", "binary_cross_entropy_backward")
def _entropy(a: Arguments) -> None:
    reduction(a)
    sizes(a["target"], a["self"].shape, "`target`")
    if "grad_output" in a and a["grad_output"].dim():
        sizes(a["grad_output"], a["self"].shape, "`grad_output`")


@before("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(a: Arguments) -> None:
    sizes(a["output"], a["grad_output"].shape, "`output`")


@before("_cdist_backward")
def _distances_backward(a: Arguments) -> None:
    one, other = a["x1"], a["x2"]
    require(one.dim() >= 2 and other.dim() >= 2, "`x1` and `x2` must have two axes or more")
    require(one.shape[-1] == other.shape[-1], "the points of `x1` and `x2` must have as many coordinates")
    batch = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    for name in ("grad", "cdist"):
        sizes(a[name], (*batch, one.shape[-2], other.shape[-2]), f"`{name}`")
