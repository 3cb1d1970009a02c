"""Programs captured again, where their functional graph lacks operators that a GPU would run.

These are attention that CPUs compute by its definition and GPUs fuse (with dropout, or with a mask that has a
gradient); launches of Triton kernels, which other graphs hold by name or inside of operators of
`torch.library.triton_op`; and custom operators that write to their arguments, which other graphs call on copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from aotexport.capture.forward import ForwardCapture
from aotexport.capture.functional.capture import Refused, capture_functional_graph
from aotexport.capture.functional.mutating_operators import call_subgraph
from aotexport.capture.passes.launches import launched
from aotexport.lower.cuda.attention import factor_of, fused
from aotexport.lower.cuda.retarget import CannotLower, laid_out_in
from aotexport.process.blocks import quiet
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport.torch_internals.launches import triton_target
from aotexport.torch_internals.names import runs_triton

aten: Any = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default
_FUSED_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def captured_for_gpu(forward: ForwardCapture, functional: FunctionalCapture, *, grad: bool) -> FunctionalCapture:
    """Return a program's functional graph with the operators of GPUs and launches of Triton kernels.

    It is `functional`, where another capture would make the same.

    Raises:
        CannotLower: the program has Triton kernels, or custom operators that write to their arguments, and cannot be
            captured as the compiler takes these.
    """
    nodes = functional.module.graph.nodes
    launches = any(runs_triton(node.target) or node.target in (launched, call_subgraph) for node in nodes)
    if not launches and not _has_attention_by_definition(forward, functional):
        return functional
    with triton_target(), quiet("torch._higher_order_ops"):
        captured = capture_functional_graph(forward, grad=grad, instead={ATTENTION: _attention}, launches=launches)
    if not isinstance(captured, Refused) and list(_interface(captured.module)) == list(_interface(functional.module)):
        return captured
    if launches:
        reason = captured.reason if isinstance(captured, Refused) else "their results are laid out otherwise"
        raise CannotLower(f"its kernels and custom operators cannot be captured for the compiler: {reason}")
    return functional


def _has_attention_by_definition(forward: ForwardCapture, functional: FunctionalCapture) -> bool:
    if forward.effects.autograd_functions:
        return False
    return len(_nodes(forward.graph, ATTENTION)) != len(_nodes(functional.module, _FUSED_ON_CPU))


def _nodes(module: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def _interface(module: torch.fx.GraphModule) -> Iterator[Any]:
    """Yield dtype, shape and strides of a graph's inputs and outputs."""
    outputs: Any = module.graph.output_node().args[0]
    for value in (*module.graph.find_nodes(op="placeholder"), *outputs):
        shown = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        is_tensor = isinstance(shown, torch.Tensor)
        yield (shown.dtype, str([*shown.shape, *shown.stride()])) if is_tensor else str(shown)


def _attention(
    like: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention by an operator of GPUs, laid out as `like`; by torch's function where they have none."""
    factor = factor_of(query, scale)
    is_served = enable_gqa or query.shape[1] == key.shape[1]
    found = fused(query, key, value, attn_mask, dropout_p, is_causal, factor) if is_served else None
    if found is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, factor, enable_gqa
        )
    return laid_out_in(found[0], like)
