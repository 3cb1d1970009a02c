"""Run a forward graph once more: to trace a functional graph, and for the analysis before it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from aotexport.capture.functional.overlapping_views import OverlappingView, asks_for_size
from aotexport.capture.functional.shared_casts import Cast
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.torch_internals.names import FakeTensor, OpOverload
from aotexport_runtime.engines.reuse import IN_PLACE

_DROPOUTS = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)

_HALVES = (torch.bfloat16, torch.float16)

_PRODUCTS = ("aten::mm.default", "aten::addmm.default", "aten::bmm.default", "aten::baddbmm.default")
_NEW = frozenset((*IN_PLACE, *_PRODUCTS))
"""Differentiable operators whose result is one tensor with memory of its own."""


class Retrace(torch.fx.Interpreter):
    """Run a forward graph while a functional one is traced."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        instead: Mapping[Any, Callable[..., Any]],
        casts: Mapping[torch.fx.Node, Sequence[Cast]] = MappingProxyType({}),
    ) -> None:
        """Prepare to run `graph`; for `instead` see `capture_functional_graph`, for `casts`, `shared_casts`."""
        super().__init__(graph)
        self._instead = instead
        self._casts = casts
        self._made: dict[Cast, torch.Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        other = self._instead.get(n.target) if callable(n.target) else None
        if other is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return other(n.meta["val"], *args, **kwargs)

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        """Return the arguments of a node, shared casts in place of weights."""
        casts = self._casts.get(n, ())
        weights = {cast.weight: self.env[cast.weight] for cast in casts}
        for cast in casts:
            if cast not in self._made:
                self._made[cast] = weights[cast.weight].to(cast.dtype)
            self.env[cast.weight] = self._made[cast]
        try:
            return super().fetch_args_kwargs_from_env(n)
        finally:
            self.env.update(weights)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.as_strided.default and asks_for_size(*args, **kwargs):
            return OverlappingView.apply(*args, *kwargs.values())
        if target is torch.ops.aten.set_data.default:
            # Functional graphs have no versions; the eager run records the work of the epilogue.
            with torch.no_grad():
                return args[0].set_(args[1].detach())
        if target not in _DROPOUTS or len(args) != 3:
            return super().call_function(target, args, kwargs)
        # Their decomposition copies where eager returns the input itself, and draws where eager does not.
        # Source: torch 2.13, aten/src/ATen/native/Dropout.cpp, `_dropout_impl`.
        tensor, p, train = args
        if p == 0 or not train:
            return tensor
        if p == 1:
            return tensor.mul(tensor.new_zeros(()))
        if target is torch.ops.aten.dropout.default and tensor.device.type == "cpu" and tensor.dtype in _HALVES:
            # Eager's backward multiplies by the scaled mask, which is rounded; `native_dropout`'s by the scale.
            return tensor.mul(torch.native_dropout(torch.ones_like(tensor), p, True)[0])
        return super().call_function(target, args, kwargs)


class Analysis(Retrace):
    """Run a forward graph so that AOTAutograd learns which inputs change and which outputs alias.

    Operators that return new memory do not matter for this. They do not run: their users get a new tensor.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, instead: Mapping[Any, Callable[..., Any]], new: set[torch.fx.Node]
    ) -> None:
        """Prepare to run `graph`.

        Args:
            graph: a forward graph.
            instead: see `capture_functional_graph`.
            new: the nodes that need not run, see `without_memory_of_others`.
        """
        super().__init__(graph, instead)
        self._new = new
        self._records: dict[torch.fx.Node, bool] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Return the result of a node; None: it does not run, and nothing that runs uses it."""
        if n not in self._new:
            result = super().run_node(n)
            self._records[n] = isinstance(result, torch.Tensor) and result.requires_grad
            return result
        like = n.meta["val"]
        differentiable = like.is_floating_point() or like.is_complex()
        records = torch.is_grad_enabled() and differentiable and any(map(self._records.get, n.all_input_nodes))
        self._records[n] = records
        return None if self._new.issuperset(n.users) else _new_tensor(like, records)


def _new_tensor(like: torch.Tensor, records: bool) -> torch.Tensor:
    """Return a tensor like the result of an operator: no leaf if autograd records it."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(True).clone() if records else made


def without_memory_of_others(
    forward: ForwardCapture, instead: Mapping[Any, Callable[..., Any]], *, grad: bool
) -> set[torch.fx.Node]:
    """Return the nodes that `Analysis` need not run: their sizes are known, and their memory is new.

    Args:
        forward: a forward graph.
        instead: see `capture_functional_graph`.
        grad: whether the analysis looks at autograd's records; if so, a graph with operators that write, or that
            change grad mode, runs whole.
    """
    environment = forward.fakes.mode.shape_env
    assert environment is not None
    found: set[torch.fx.Node] = set()
    if environment.var_to_range:
        return found
    for node in forward.graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.op == "get_attr" or type(node.meta["val"]) is not FakeTensor:
                return set()
        elif node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, OpOverload) or (grad and node.target._schema.is_mutable):
                return set()
            if _name(node.target) in _NEW and node.target not in instead and type(node.meta["val"]) is FakeTensor:
                found.add(node)
    # Making a new tensor takes as long as running an operator, so single ones are not worth skipping.
    return {node for node in found if found.issuperset(node.users) or not found.isdisjoint(node.all_input_nodes)}


def _name(target: OpOverload) -> str:
    return f"{target._schema.name}.{target._overloadname}"
