"""Sequences: CTC loss, recurrent layers, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aotexport_runtime.execution.autocast import autocast_dtype
from aotexport_runtime.execution.preconditions.require import Arguments, integers, require, sizes, within


def ctc(a: Arguments) -> None:
    """Check lengths and targets of the CTC loss."""
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


def ctc_written(a: Arguments, results: Sequence[torch.Tensor]) -> None:
    """Write what the kernel leaves of its table: steps beyond an input, and places beyond its targets."""
    alpha = results[1].data  # has a version of its own: autograd has kept this tensor
    taken, wanted = (integers(a[name]).to(alpha.device) for name in ("input_lengths", "target_lengths"))
    steps, places = (torch.arange(size, device=alpha.device) for size in alpha.shape[1:])
    beyond = (steps >= taken.reshape(-1, 1))[:, :, None] | (places > 2 * wanted.reshape(-1, 1))[:, None]
    alpha.masked_fill_(beyond, -math.inf)


def ctc_backward(a: Arguments) -> None:
    """Check what the forward kernel of the CTC loss gives to its backward."""
    ctc(a)
    require(a["log_probs"].dim() == 3, "`log_probs` must have three axes")
    steps, batch = a["log_probs"].shape[:2]
    sizes(a["grad"], (batch,), "`grad`")
    sizes(a["neg_log_likelihood"], (batch,), "`neg_log_likelihood`")
    alpha = a["log_alpha"]
    require(alpha.dim() == 3 and tuple(alpha.shape[:2]) == (batch, steps), "`log_alpha` must be of this batch")
    within(integers(a["target_lengths"]), 0, (alpha.shape[2] - 1) // 2 + 1, "`target_lengths`")


def recurrent(a: Arguments) -> None:
    """Check the layers of `lstm`, `gru` and `rnn_*`, of padded and of packed input."""
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
    """Check how many of the packed sequences go on at each step."""
    require(batch_sizes.dim() == 1 and batch_sizes.dtype == torch.int64, "`batch_sizes` must be a row of int64")
    within(batch_sizes, 1, data.shape[0] + 1, "`batch_sizes`")
    require((batch_sizes[1:] <= batch_sizes[:-1]).all(), "`batch_sizes` must not rise")
    require(batch_sizes.sum() == data.shape[0], "`batch_sizes` must add up to the rows of `data`")


def unpacked(a: Arguments) -> None:
    """Check the steps of packed sequences."""
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


def attention(a: Arguments) -> None:
    """Check the heads of grouped attention."""
    query, key, value = a["query"], a["key"], a["value"]
    require(key.dim() < 2 or key.shape[-2:-1] == value.shape[-2:-1], "`key` and `value` must have as many steps")
    if a["enable_gqa"]:
        require(min(query.dim(), key.dim(), value.dim()) >= 3, "`query`, `key` and `value` must have heads")
        for name, heads in (("key", key.shape[-3]), ("value", value.shape[-3])):
            require(
                heads > 0 and query.shape[-3] % heads == 0, f"the heads of `query` must be those of `{name}`, repeated"
            )


def flash_attention(a: Arguments) -> None:
    """Check the steps and heads by which the kernel for processors divides."""
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


def flash_attention_backward(a: Arguments) -> None:
    """Check what the forward kernel for processors gives to its backward."""
    flash_attention(a)
    query, value, out, grad = (a[name] for name in ("query", "value", "out", "grad_out"))
    require(out.dtype == grad.dtype == query.dtype, "all tensors must have four axes and one dtype")
    batch, heads, steps, _ = query.shape
    _rows(out)
    sizes(out, (batch, heads, steps, value.shape[3]), "`out`")
    sizes(grad, out.shape, "`grad_out`")
    sizes(a["logsumexp"], (batch, heads, steps), "`logsumexp`")
