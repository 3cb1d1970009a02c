"""Recurrent layers and packed sequences: traced as whole operators, which take sequences of any length.

Torch takes them apart step by step, which fixes the number of steps.

Source: torch 2.13, `aten/src/ATen/native/RNN.cpp` and `PackedSequence.cpp`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import _VF, nn
from torch.nn.modules import rnn

from aotexport.model.source_lines import is_user_file
from aotexport.process.patches import Patch
from aotexport.torch_internals.calls import tensors_in
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.tracing import record_call, traces_above_autograd, tracing_paused

aten = torch.ops.aten

_BATCH = "_aotexport_batch"
"""Attribute of the fake sizes of a packed sequence's steps: the first of them, which is the number of sequences."""

Function = Callable[..., Any]


def whole_recurrence() -> Mapping[Any, Function]:
    """Return functions to trace in place of recurrent operators and of those of packed sequences, by operator."""
    shapes: list[tuple[OpOverload, Function]] = []
    for layer in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
        shapes += [(layer.input, _padded), (layer.data, _packed)]
    recorded = {operator: _recorded(operator, made) for operator, made in shapes}
    return {**recorded, aten.select.int: _select, aten.zeros.default: _first_state}


def patches() -> list[Patch]:
    """Return the patch of a function that makes a Python number of the count of packed sequences."""

    def hidden_size(self: nn.RNNBase, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> Any:
        if batch_sizes is None:
            return hidden_size_of(self, input, None)
        layers = self.num_layers * (2 if self.bidirectional else 1)
        return layers, batch_sizes[0].item(), self.proj_size or self.hidden_size

    hidden_size_of = nn.RNNBase.get_expected_hidden_size
    reason = "Keep the number of packed sequences a number of the graph"
    return [Patch(nn.RNNBase, "get_expected_hidden_size", hidden_size, reason)]


UNPACKING = frozenset((_VF._pad_packed_sequence, aten._pad_packed_sequence.default))
"""Functions that `unpacked` records: as the model's code calls it, and as the graph of a loaded bundle does.

Their bindings make a Python number of the length.
"""


def unpacked(*args: Any) -> Any:
    """Return the recorded result of a function of `UNPACKING`; NotImplemented: torch may call it."""
    return _recorded(aten._pad_packed_sequence.default, _unpacked)(*args)


def pack(tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fake elements of packed sequences, one step after the other, and the fake sizes of the steps."""
    batch, steps = tensor.shape[:2] if batch_first else tensor.shape[:2][::-1]
    context = torch.library.get_ctx()
    rows, longest = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    torch._check(longest <= steps)
    torch._check(rows <= batch * steps)
    sizes = torch.empty(longest, dtype=torch.int64)
    setattr(sizes, _BATCH, batch)
    return tensor.new_empty((rows, *tensor.shape[2:])), sizes


LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
PACKED = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data, aten._pad_packed_sequence.default)


def unfit_layer(node: torch.fx.Node, grad: bool) -> str | None:
    """Return why the joint (`grad`) or inference graph cannot hold a recurrent operator; None: it can."""
    steps = node.args[0].meta["val"].shape[1 if node.args[-1] else 0]  # type: ignore[union-attr]
    if node.target in PACKED or (grad and not isinstance(steps, int)):
        name = node.target._schema.name  # type: ignore[union-attr]
        return f"`{name}` has a dynamic number of steps, and functional graphs take recurrence apart, step by step"
    layers, dropout, trains = node.args[4:7]
    # Source: torch 2.13, torch/_decomp/decompositions.py, `_rnn_helper`, whose condition for it holds for no layer.
    drops = layers > 1 and dropout and trains  # type: ignore[operator]
    return "torch leaves out the dropout between recurrent layers where it takes them apart" if drops else None


def _stand_in(layer: OpOverload) -> OpOverload:
    _LIBRARY.define(str(layer._schema).removeprefix("aten::"))
    name = layer._schema.name.removeprefix("aten::")
    _LIBRARY.impl(f"{name}.input", lambda *args: tuple(_padded(*args)), "Meta")
    return getattr(torch.ops.aotexport_recurrence, name).input


def put_back(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Put a recurrent operator in place of the one that stands for it."""
    node.target = next(layer for layer, stand_in in STAND_INS.items() if stand_in is node.target)


_LIBRARY = torch.library.Library("aotexport_recurrence", "DEF")
STAND_INS: Mapping[OpOverload, OpOverload] = {layer: _stand_in(layer) for layer in LAYERS}
"""Operators that stay whole in a trace, by the recurrent ones of padded sequences for which they stand."""


def _padded(
    tensor: torch.Tensor, hx: Any, params: Any, biases: bool, layers: int, dropout: float, *rest: bool
) -> list[torch.Tensor]:
    _, bidirectional, batch_first = rest
    batch, steps = tensor.shape[:2] if batch_first else tensor.shape[:2][::-1]
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    output = tensor.new_empty((steps, batch, states[0].shape[2] * (2 if bidirectional else 1)))
    return [output.transpose(0, 1) if batch_first else output, *map(_like, states)]


def _packed(
    data: torch.Tensor, sizes: Any, hx: Any, params: Any, biases: bool, layers: int, dropout: float, *rest: bool
) -> list[torch.Tensor]:
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    return [data.new_empty((data.shape[0], states[0].shape[2] * (2 if rest[1] else 1))), *map(_like, states)]


def _like(state: torch.Tensor) -> torch.Tensor:
    return state.new_empty(state.shape)


def _unpacked(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, total_length: Any
) -> list[torch.Tensor] | None:
    batch = getattr(sizes, _BATCH, None)
    if batch is None:
        return None
    steps = total_length if isinstance(total_length, torch.SymInt) or total_length > 0 else sizes.shape[0]
    padded = data.new_empty((steps, batch, *data.shape[1:]))
    return [padded.transpose(0, 1) if batch_first else padded, torch.empty(batch, dtype=torch.int64)]


def _recorded(operator: OpOverload, make: Function) -> Function:
    """Return a function that records an operator whole, with the fakes of its results that `make` returns."""

    def record(*args: Any, **kwargs: Any) -> Any:
        # Autocast works within the operator, on the ones that it is made of.
        if not traces_above_autograd() or kwargs or torch.is_autocast_enabled(args[0].device.type):
            return NotImplemented
        with tracing_paused() as tracer:
            made = make(*args)
            if made is None:
                return NotImplemented
            results = _recorded_by_autograd(made, args)
            record_call(tracer, operator, args, results)
        return results

    return record


def _recorded_by_autograd(made: list[torch.Tensor], args: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Return the fakes of results as autograd gives them back: with a history, if an operand requires grad."""
    sources = [tensor for tensor in tensors_in(list(args)) if tensor.requires_grad]
    if not (torch.is_grad_enabled() and sources):
        return tuple(made)
    return _Whole.apply(made, *sources)


class _Whole(torch.autograd.Function):
    """Stands for an operator that is traced whole; a model that takes its gradients is traced again, without it."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        ctx.save_for_backward(*sources)
        ctx.mark_non_differentiable(*[tensor for tensor in made if not tensor.is_floating_point()])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with tracing_paused():
            return (None, *[torch.empty_like(source) for source in ctx.saved_tensors])


def _select(tensor: torch.Tensor, dim: int, index: Any) -> Any:
    """Record the number of packed sequences, read from the sizes of their steps, as the size that it is."""
    batch = getattr(tensor, _BATCH, None)
    if batch is None or dim or isinstance(index, torch.SymInt) or index or not traces_above_autograd():
        return NotImplemented
    with tracing_paused() as tracer:
        first: Any = tensor.select(0, 0)
        first.item_memo = batch
        record_call(tracer, aten.select.int, (tensor, dim, index), first)
    return first


def _first_state(size: Any, **options: Any) -> Any:
    """Make the first state of a recurrent layer from its input: in another dtype of the model, the state has it too."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename == rnn.__file__:
            return frame.f_locals["input"].new_zeros(size)
        frame = frame.f_back
    return NotImplemented
