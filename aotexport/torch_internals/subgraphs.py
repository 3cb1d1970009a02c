"""Operators that run a function: marks for torch's compiler, and AOTAutograd's form of operators that mutate."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import _trace_wrapped_higher_order_op as attention_indices
from torch._higher_order_ops import utils as hop_utils
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2, auto_functionalized_v2_dense
from torch._higher_order_ops.base_hop import BaseHOP
from torch._higher_order_ops.flex_attention import FlexAttentionHOP, sdpa_dense
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP
from torch._higher_order_ops.out_dtype import OutDtypeOperator, out_dtype_dense
from torch._higher_order_ops.wrap import WrapWithSetGradEnabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from aotexport.process.patches import Patch

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

    def run_in_dtype(operator: Any, function: Callable[..., Any], dtype: torch.dtype, *operands: Any) -> Any:
        return out_dtype_dense(function, dtype, *operands)  # type: ignore[arg-type]

    def run_attention(operator: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_dense(*args, **kwargs)

    inlined = [
        (BaseHOP, "__call__", run),
        (InvokeSubgraphHOP, "__call__", run_subgraph),
        (sys.modules[InvokeSubgraphHOP.__module__], "invoke_subgraph_placeholder", run_region),
        (FlexAttentionHOP, "__call__", run_attention),
        (attention_indices, "mod_index", torch.ops.aten.index),
        (WrapWithSetGradEnabled, "__call__", run_in_mode),
        (OutDtypeOperator, "__call__", run_in_dtype),
    ]
    return [
        Patch(owner, name, run, "Trace into regions that are marked for torch's compiler")
        for owner, name, run in inlined
    ]


def functionalised_calls(
    module: torch.fx.GraphModule,
) -> Iterator[tuple[torch.fx.Node, Callable[..., Any], list[torch.fx.Node]]]:
    """Yield the calls in a functional graph that replace operators which write to their arguments.

    Each is the node; a function that copies written arguments, calls the operator and returns its results and the
    copies; and the nodes whose values the function takes.
    """
    for node in module.graph.find_nodes(op="call_function", target=auto_functionalized_v2):
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda arg: _attribute(module, arg))
        leaves, structure = tree_flatten(arguments)
        operands = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)))

        def run(*values: Any, leaves: list[Any] = leaves, structure: Any = structure, of: Any = operands) -> Any:
            value_of = dict(zip(of, values, strict=True))
            filled = [value_of[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, structure)
            return auto_functionalized_v2_dense(*args, **kwargs)

        yield node, run, operands


def _attribute(module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """Return the attribute of the graph that a node is, if it is no tensor; else the node."""
    return node if node.op != "get_attr" or "val" in node.meta else getattr(module, str(node.target))


def trace_function(
    function: Callable[..., Any], values: Sequence[Any], fake_mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Trace a function of fake tensors and sizes, without decompositions."""
    with fake_mode, torch.no_grad():
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*values)


def bodies_compiled_without(*modes: type[TorchFunctionMode]) -> Patch:
    """Return a patch that takes modes away while torch's compiler captures the body of an operator."""
    environment: Any = hop_utils._set_compilation_env
    removed: list[Any] = [proxy_tensor._make_temp_remove_mode_context_manager(mode) for mode in modes]

    @contextlib.contextmanager
    def compiled() -> Iterator[None]:
        with environment(), contextlib.ExitStack() as stack:
            for without_mode in removed:
                stack.enter_context(without_mode())
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
