"""Run a forward graph once more: to trace a functional graph, and for the analysis before it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.torch_internals.calls import FakeTensor, memory_of, tensors_in
from aotexport.torch_internals.checks import knows_data_dependent_numbers
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.tracing import REQUIRES_GRAD

_DROPOUTS = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)

_HALVES = (torch.bfloat16, torch.float16)


class Retrace(torch.fx.Interpreter):
    """Run a forward graph while a functional one is traced, or so that AOTAutograd learns what changes and aliases."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        instead: Mapping[Any, Callable[..., Any]],
        count: Callable[[int, int], None] = lambda done, of: None,
        hidden: Set[torch.fx.Node] = frozenset(),
    ) -> None:
        """Prepare to run a forward graph.

        Args:
            graph: the graph.
            instead: see `capture_functional_graph`.
            count: likewise.
            hidden: nodes that need not run, see `hidden_values`: what runs gets new tensors for their results.
        """
        super().__init__(graph)
        self._instead = instead
        self._places = {node: place for place, node in enumerate(graph.graph.nodes)}
        self._count = count
        self._hidden = hidden

    def run_node(self, n: torch.fx.Node) -> Any:
        """Return the result of a node; None: it does not run, and nothing that runs uses it."""
        self._count(self._places[n], len(self._places))
        if n in self._hidden:
            like = n.meta["val"]
            if not isinstance(like, torch.Tensor):
                return like
            records = torch.is_grad_enabled() and n.meta[REQUIRES_GRAD]
            return None if all(user in self._hidden for user in n.users) else _new_tensor(like, records)
        other = self._instead.get(n.target) if callable(n.target) else None
        if other is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return other(n.meta["val"], *args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.set_data.default:
            # Functional graphs have no versions; the eager run records the work of the epilogue.
            with torch.no_grad():
                return args[0].set_(args[1].detach())
        if target in _DROPOUTS and len(args) == 3:
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


def _new_tensor(like: torch.Tensor, records: bool) -> torch.Tensor:
    """Return a tensor like the result of an operator: no leaf if autograd records it."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(True).clone() if records else made


def hidden_values(
    forward: ForwardCapture, instead: Mapping[Any, Callable[..., Any]], *, grad: bool
) -> set[torch.fx.Node]:
    """Return the nodes that AOTAutograd's analysis need not run: no input or output shares memory with their results.

    A graph of which this cannot be told from its operators and values runs whole.

    Args:
        forward: a forward graph.
        instead: see `capture_functional_graph`.
        grad: whether the analysis looks at autograd's records; if so, a graph with operators that write runs whole.
    """
    graph, environment = forward.graph.graph, forward.fakes.mode.shape_env
    assert environment is not None
    # A new run makes new symbols for sizes that depend on values.
    if knows_data_dependent_numbers(environment):
        return set()
    hidden: set[torch.fx.Node] = set()
    # Dropouts that draw nothing return their input, of which the graph has a copy, see `Retrace.call_function`.
    copied: dict[int, int] = {}
    for node in graph.nodes:
        if node.target in _DROPOUTS and len(node.args) == 3 and (node.args[1] == 0 or not node.args[2]):
            source = memory_of(node.args[0].meta["val"])
            copied[memory_of(node.meta["val"])] = copied.get(source, source)

    def memories(node: torch.fx.Node) -> set[int]:
        return {copied.get(memory, memory) for memory in map(memory_of, _values(node))}

    ends = [node for node in graph.nodes if node.op in ("placeholder", "output")]
    visible = set[int]().union(*map(memories, ends))
    for node in graph.nodes:
        values = _values(node)
        if node.op == "get_attr" or any(type(value) is not FakeTensor for value in values):
            return set()
        if node.op != "call_function":
            continue
        result = node.meta.get("val")
        if node.target is operator.getitem:
            seen = node.args[0] not in hidden
        elif isinstance(node.target, OpOverload):
            if grad and node.target._schema.is_mutable:
                return set()
            seen = node.target in instead or _has_effects(node) or not visible.isdisjoint(memories(node))
        elif result is None:
            return set()
        else:
            seen = False
        if not (seen or (grad and isinstance(result, torch.Tensor) and REQUIRES_GRAD not in node.meta)):
            hidden.add(node)
    return hidden


def _values(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node results in, or that the graph returns."""
    if node.op == "output":
        return [value for result in node.all_input_nodes for value in _values(result)]
    return tensors_in(node.meta.get("val"))


def _has_effects(node: torch.fx.Node) -> bool:
    """Return whether an operator may do more than return new values."""
    target, value = node.target, node.meta.get("val")
    assert isinstance(target, OpOverload)
    # Normalisation in train mode writes to running statistics, and its schema does not say so.
    writes = target._schema.is_mutable or any(argument.name == "running_mean" for argument in target._schema.arguments)
    listed = isinstance(value, list | tuple) and any(user.target is not operator.getitem for user in node.users)
    return writes or listed or value is None or target.namespace != "aten"
