"""Operators that run a function: marks for torch's compiler, and AOTAutograd's form of operators that mutate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import _trace_wrapped_higher_order_op as attention_indices
from torch._higher_order_ops import invoke_subgraph
from torch._higher_order_ops import utils as hop_utils
from torch._higher_order_ops.base_hop import BaseHOP
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction

from aotexport.process.patches import Patch
from aotexport.torch_internals.names import DispatchKey
from aotexport.torch_internals.outside import function_modes

__all__ = ["CheckpointFunction", "checkpoints"]


def marks_inlined() -> list[Patch]:
    """Return patches of operators that mark a region for torch's compiler: their function just runs, as in eager."""

    def run(operator: Any, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        return function(*operands)

    def run_subgraph(operator: Any, function: Callable[..., Any], identifier: Any, *operands: Any) -> Any:
        return function(*operands)

    def run_region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def run_in_mode(operator: Any, mode: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(mode):
            return function(*args, **kwargs)

    operators = torch.ops.higher_order
    inlined = [
        (BaseHOP, "__call__", run),
        (type(operators.invoke_subgraph), "__call__", run_subgraph),
        (invoke_subgraph, "invoke_subgraph_placeholder", run_region),
        (type(operators.flex_attention), "__call__", run_dense),
        (attention_indices, "mod_index", torch.ops.aten.index),
        (type(operators.wrap_with_set_grad_enabled), "__call__", run_in_mode),
        (type(operators.out_dtype), "__call__", run_dense),
    ]
    return [
        Patch(owner, name, run, "Trace into regions that are marked for torch's compiler")
        for owner, name, run in inlined
    ]


def run_dense(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that takes functions by its kernel in Python, below autograd."""
    return operator.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)


FUNCTIONALISED = torch.ops.higher_order.auto_functionalized_v2
"""The target of nodes of functional graphs that replace operators which write to their arguments."""


def functionalised_call(
    module: torch.fx.GraphModule, node: torch.fx.Node
) -> tuple[Callable[..., Any], list[torch.fx.Node]]:
    """Return what a node of `FUNCTIONALISED` does, and the nodes whose values that takes.

    It copies written arguments, calls the operator, and returns its results and the copies.
    """
    inputs = node.all_input_nodes
    attributes = {each: getattr(module, str(each.target)) for each in inputs if each.op == "get_attr"}
    # Attributes that are no tensors are functions.
    operands = [each for each in inputs if each.op != "get_attr" or "val" in each.meta]

    def run(*values: Any) -> Any:
        value_of = attributes | dict(zip(operands, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of.__getitem__)
        return run_dense(node.target, *args, **kwargs)

    return run, operands


def trace_function(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace a function of fake tensors and sizes, without decompositions."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*values)


def bodies_compiled_without(*modes: type[TorchFunctionMode]) -> Patch:
    """Return a patch that takes modes away while torch's compiler captures the body of an operator."""
    environment: Any = hop_utils._set_compilation_env

    @contextlib.contextmanager
    def compiled() -> Iterator[None]:
        with environment(), function_modes(lambda mode: not isinstance(mode, modes)):
            yield

    return Patch(hop_utils, "_set_compilation_env", compiled, "Hide modes of ours, which the compiler would trace")


def lift_tensors(subgraphs: Sequence[torch.fx.GraphModule]) -> list[torch.Tensor]:
    """Turn tensors that subgraphs close over into further inputs, the same for each subgraph; return them."""
    found: dict[int, torch.Tensor] = {}
    for subgraph in subgraphs:
        for node in subgraph.graph.find_nodes(op="get_attr"):
            tensor = getattr(subgraph, str(node.target))
            if isinstance(tensor, torch.Tensor):
                found[id(tensor)] = tensor
    for subgraph in subgraphs:
        first = next(node for node in subgraph.graph.nodes if node.op != "placeholder")
        with subgraph.graph.inserting_before(first):
            placeholders = {key: subgraph.graph.placeholder(f"lifted_{index}") for index, key in enumerate(found)}
        for key, placeholder in placeholders.items():
            placeholder.meta["val"] = found[key]
        taken: list[str] = []
        for node in subgraph.graph.find_nodes(op="get_attr"):
            tensor = getattr(subgraph, str(node.target))
            if isinstance(tensor, torch.Tensor):
                taken.append(str(node.target))
                node.replace_all_uses_with(placeholders[id(tensor)])
                subgraph.graph.erase_node(node)
        for name in dict.fromkeys(taken):
            delattr(subgraph, name)
    return list(found.values())
