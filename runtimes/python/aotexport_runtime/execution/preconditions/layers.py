"""Layers of networks: normalization, sequences, attention, embeddings, losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from aotexport_runtime.execution.autocast import autocast_dtype
from aotexport_runtime.execution.preconditions.require import (
    OPERATOR,
    Arguments,
    after,
    before,
    contiguous,
    integers,
    is_recorded,
    needs,
    require,
    sized,
    sizes,
    spacious,
    within,
)

_MEAN, _MAX = 1, 2
"""Modes of embedding bags."""


@before(
    *("native_batch_norm", "native_batch_norm_backward", "batch_norm_backward", "_batch_norm_with_update"),
    *("_batch_norm_with_update_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_no_update", "cudnn_batch_norm"),
    *("cudnn_batch_norm_backward", "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out"),
)
def _batch_norm(a: Arguments) -> None:
    source = a["input"]
    require(source.dim() >= 2, "`input` must have two axes or more")
    trains = "_no_" not in a[OPERATOR] and a.get("train", a.get("update", a.get("training", True)))
    require(trains or "no_stats" not in a[OPERATOR], "without running statistics `training` must be true")
    saved = [name for name in ("save_mean", "save_invstd", "save_var") if name in a]
    require(not trains or all(a[name] is not None for name in saved), "what the forward kernel saved must be given")
    # Outside of train mode the kernel gives empty tensors for what it saves, and reads none.
    read = [name for name in saved if trains or (a[name] is not None and a[name].numel())]
    sizes(a, (source.shape[1],), "weight", "bias", "running_mean", "running_var", *read)
    if not trains and "running_mean" in a:
        given = a["running_mean"] is not None and a["running_var"] is not None
        require(given, "`running_mean` and `running_var` must be given")
        # Backward reads a copy in order after it has freed it.
        contiguous(a, "running_mean", "running_var")
    sizes(a, source.shape, "grad_out", "grad_output")


@before("native_group_norm")
def _group_norm(a: Arguments) -> None:
    # From 2.14 torch gives memory that nobody has written for an `N` of 0.
    require(a["input"].numel() == a["N"] * a["C"] * a["HxW"], "`input` must have `N * C * HxW` elements")
    spacious(a, "weight", "bias")


@before("native_group_norm_backward")
def _group_norm_backward(a: Arguments) -> None:
    require(a["group"] >= 1 and a["C"] % a["group"] == 0, "`C` must be a multiple of `group`")
    sizes(a, a["input"].shape, "grad_out")
    spacious(a, "grad_out", "input", "mean", "rstd", "weight")


@before("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(a: Arguments) -> None:
    source = a["input"]
    sizes(a, source.shape, "grad_out")
    rows = math.prod(source.shape[: source.dim() - len(a["normalized_shape"])])
    _counted(a, rows, "mean", "rstd")
    spacious(a, "mean", "rstd")


def _counted(a: Arguments, count: int, *names: str) -> None:
    """Require given tensors to have so many elements."""
    for name in names:
        require(a.get(name) is None or a[name].numel() == count, f"`{name}` must be {count} numbers")


@before("_weight_norm", "_weight_norm_interface", "_weight_norm_interface_backward")
def _weight_norm(a: Arguments) -> None:
    direction, norms, axis = (a.get(name, a.get(f"saved_{name}")) for name in ("v", "g", "dim"))
    require(0 <= axis < direction.dim(), f"`dim` must be from 0 to below {direction.dim()}")
    require(direction.numel() > 0, "`v` must not be empty")
    size = direction.shape[axis]
    require(norms.numel() == size, f"`g` must be {size} numbers")
    require(norms.dtype == direction.dtype, "`g` must be of the dtype of `v`")
    _counted(a, size, "saved_norms")
    _counted(a, direction.numel(), "grad_w")
    if "interface" in a[OPERATOR]:
        contiguous(a, "v", "g", "grad_w", "saved_v", "saved_g", "saved_norms")


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
    sizes(a, (batch,), "grad", "neg_log_likelihood")
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
    require(source.dim() == (2 if packed else 3), "the input must have as many axes as the layers take")
    require(1 <= a["num_layers"] <= len(a["params"]), "`num_layers` must be that of `params`")
    layers = a["num_layers"] * (1 + a["bidirectional"])
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
        _steps(a)
        batch = int(a["batch_sizes"].max()) if a["batch_sizes"].numel() else 0
    else:
        batch = source.shape[0 if a["batch_first"] else 1]
    for state in states:
        require(state.shape[1] == batch, f"`hx` must be of a batch of {batch}")


@before("_pad_packed_sequence")
def _steps(a: Arguments) -> None:
    counts, data = a["batch_sizes"], a["data"]
    require(data.dim() >= 1, "`data` must have rows")
    require(counts.dim() == 1 and counts.dtype == torch.int64, "`batch_sizes` must be a row of int64")
    within(counts, 1, data.shape[0] + 1, "`batch_sizes`")
    require((counts[1:] <= counts[:-1]).all(), "`batch_sizes` must not rise")
    require(counts.sum() == data.shape[0], "`batch_sizes` must add up to the rows of `data`")


def _weights(a: Arguments, width: int, states: list[torch.Tensor], *, projected: bool) -> None:
    """Check the sizes of the weights of every layer, which take `width` numbers a step."""
    directions, given = 1 + a["bidirectional"], iter(a["params"])
    hidden, returned = states[-1].shape[2], states[0].shape[2]
    rows = 4 * hidden if len(states) == 2 else a["params"][0].shape[0]
    for layer in range(a["num_layers"]):
        expected = [(rows, width if layer == 0 else directions * returned), (rows, returned)]
        expected += [(rows,)] * 2 * a["has_biases"] + [(returned, hidden)] * projected
        for shape in expected * directions:
            sized(next(given), shape, "a tensor of `params`")


@before("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def _attention(a: Arguments) -> None:
    query, key, value = a["query"], a["key"], a["value"]
    require(key.dim() < 2 or key.shape[-2:-1] == value.shape[-2:-1], "`key` and `value` must have as many steps")
    if a["enable_gqa"]:
        require(min(query.dim(), key.dim(), value.dim()) >= 3, "`query`, `key` and `value` must have heads")
        for name, heads in (("key", key.shape[-3]), ("value", value.shape[-3])):
            is_shared = heads > 0 and query.shape[-3] % heads == 0
            require(is_shared, f"the heads of `query` must be those of `{name}`, repeated")


@before("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_attention(a: Arguments) -> None:
    query, key, value = operands = [a[name] for name in ("query", "key", "value")]
    given = [*operands, a["out"], a["grad_out"]] if "out" in a else operands
    is_alike = all(tensor.dim() == 4 and tensor.dtype == query.dtype for tensor in given)
    require(is_alike, "all tensors must have four axes and one dtype")
    for tensor in given[:4]:
        in_order = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel()
        require(in_order, "the numbers of a step must lie one after the other")
    require(0 not in (*query.shape[1:], *key.shape[1:3]), "`query` and `key` must have heads, steps and an embedding")
    (batch, heads, steps, depth), shared = query.shape, key.shape[1:3]
    sizes(a, (batch, *shared, depth), "key")
    sizes(a, (batch, *shared, value.shape[3]), "value")
    require(heads % shared[0] == 0, "the heads of `query` must be those of `key`, repeated")
    sizes(a, (batch, heads, steps, value.shape[3]), "out", "grad_out")
    sizes(a, (batch, heads, steps), "logsumexp")


@before("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(a: Arguments) -> None:
    indices, offsets = a["indices"], a["offsets"]
    require(a["weight"].dim() == 2, "`weight` must have two axes")
    _bags(a, a["weight"].shape[0])
    if a["include_last_offset"] and offsets.shape[0] and is_recorded(a):
        require((offsets[-1:] == indices.shape[0]).all(), "with gradients the last of `offsets` must be the end")


def _bags(a: Arguments, rows: Any) -> None:
    """Check bags of embeddings; their offsets may be left out."""
    indices, offsets = a["indices"], a.get("offsets")
    # torch 2.7 takes another one and reads outside.
    require(0 <= a["mode"] <= _MAX, "`mode` must be from 0 to 2")
    contiguous(a, "offsets")
    for name in ("indices", "offsets"):
        if a.get(name) is not None:
            require(a[name].dim() == 1, f"`{name}` must have one axis")
            require(a[name].dtype in (torch.int32, torch.int64), f"`{name}` must be of dtype int32 or int64")
    within(indices, 0, rows, "`indices`")
    sizes(a, indices.shape, "per_sample_weights")
    if offsets is not None:
        within(offsets, 0, indices.shape[0] + 1, "`offsets`")
        require(offsets.shape[0] or not indices.shape[0], "`offsets` must not be empty")
        rises = (offsets[:1] == 0).all() & (offsets[1:] >= offsets[:-1]).all()
        require(rises, "`offsets` must rise from 0")


@before("_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward")
def _embedding_bag_backward(a: Arguments) -> None:
    grad, indices, offsets, rows = a["grad"], a["indices"], a.get("offsets"), a.get("num_weights")
    require(grad.dim() == 2, "`grad` must have two axes")
    rows = a["weight"].shape[0] if rows is None else rows
    _bags(a, rows)
    if a["offset2bag"].numel() or offsets is None:
        sizes(a, indices.shape, "offset2bag")
    within(a["offset2bag"], 0, grad.shape[0], "`offset2bag`")
    if offsets is not None:
        require((offsets < indices.shape[0]).sum() <= grad.shape[0], "`grad` must have a row per bag")
    bags = a.get("bag_size")
    if bags is not None and (bags.numel() or (a["mode"] == _MEAN and offsets is None)):
        require(bags.numel() >= grad.shape[0], "`bag_size` must be a number per bag")
    contiguous(a, "offset2bag", "bag_size", "maximum_indices")
    if a["mode"] == _MAX and a.get("maximum_indices") is not None:
        sizes(a, grad.shape, "maximum_indices")
        within(a["maximum_indices"], -1, rows, "`maximum_indices`")


@before("embedding_dense_backward")
def _embedding_backward(a: Arguments) -> None:
    grad, indices = a["grad_output"], a["indices"]
    require(grad.dim() >= 1, "`grad_output` must have an axis")
    sizes(a, (*indices.shape, grad.shape[-1]), "grad_output")
    within(indices, 0, a["num_weights"], "`indices`")


reduction = needs(lambda a: a["reduction"] in (0, 1, 2), "`reduction` must be 0, 1 or 2")
"""Check how a loss is reduced: by another number no kernel writes a result."""


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
        _counted(a, source.shape[0] if source.dim() > 1 else 1, "grad_output")


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
    sizes(a, a["self"].shape, "target")
    if "grad_output" in a and a["grad_output"].dim():
        sizes(a, a["self"].shape, "grad_output")


before("_softmax_backward_data", "_log_softmax_backward_data")(lambda a: sizes(a, a["grad_output"].shape, "output"))


@before("_cdist_backward")
def _distances_backward(a: Arguments) -> None:
    one, other = a["x1"], a["x2"]
    require(one.dim() >= 2 and other.dim() >= 2, "`x1` and `x2` must have two axes or more")
    require(one.shape[-1] == other.shape[-1], "the points of `x1` and `x2` must have as many coordinates")
    batch = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    sizes(a, (*batch, one.shape[-2], other.shape[-2]), "grad", "cdist")
