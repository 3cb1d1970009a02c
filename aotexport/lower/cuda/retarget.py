"""A functional graph, traced again on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from aotexport.capture.forward import ForwardCapture
from aotexport.capture.functional.capture import Refused, capture_functional_graph
from aotexport.capture.functional.mutating_operators import call_subgraph
from aotexport.capture.passes.launches import launched
from aotexport.errors import ExportFailed
from aotexport.lower.cuda.attention import MOVED, factor_of, fused
from aotexport.process.blocks import quiet
from aotexport.torch_internals.calls import FakeTensor, FakeTensorMode
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport.torch_internals.inductor import retraced
from aotexport.torch_internals.launches import triton_target
from aotexport.torch_internals.names import OpOverload, runs_triton

DEVICE = torch.device("cuda:0")

_CPU_ONLY = ("_for_cpu", "mkldnn", "onednn", "_cpu")


class CannotLower(ExportFailed):
    """A program cannot be lowered; the message says why, in a sentence without a full stop."""


def retarget(module: torch.fx.GraphModule, tangents: int, mode: FakeTensorMode) -> torch.fx.GraphModule:
    """Return `module` on CUDA tensors, its operators decomposed for the compiler.

    The last `tangents` of its inputs are incoming gradients; `mode` is the fake mode of its values. `CannotLower`: it
    has operators that only CPUs have, or changes values in place.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode:
        moved = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=DEVICE)
            if isinstance(each, torch.Tensor)
            else each
            for each in inputs
        ]
    graph = retraced(_Retargeting(module).run, moved, mode)
    placeholders = graph.graph.find_nodes(op="placeholder")
    primals = len(placeholders) - tangents
    for index, node in enumerate(placeholders):
        # By these names the partitioner tells inputs and incoming gradients apart.
        node.target = f"primals_{index + 1}" if index < primals else f"tangents_{index - primals + 1}"
        node._rename(node.target)
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload):
            check_on_gpu(node.target)
            if node.target._schema.is_mutable:
                raise CannotLower(f"operator `{node.target._schema.name}` changes its operands in place")
    graph.recompile()
    return graph


def check_on_gpu(operator: OpOverload) -> None:
    """Refuse an operator that only CPUs have."""
    name = operator._schema.name
    if any(part in name for part in _CPU_ONLY):
        raise CannotLower(f"operator `{name}` runs on CPUs only")


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the axes of a tensor by their steps in memory, the longest first."""
    steps = [step if isinstance(step, int) else step.node.hint for step in value.stride()]
    return sorted(range(value.dim()), key=lambda axis: (-steps[axis], axis))


def laid_out_in(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, dense, with its axes in memory in the order of those of `like`."""
    order = memory_order(like)
    return value.permute(order).contiguous().permute(inverse(order))


def inverse(order: list[int]) -> list[int]:
    """Return the order that undoes one."""
    return sorted(range(len(order)), key=lambda place: order[place])


class _Retargeting(torch.fx.Interpreter):
    """Runs a graph with every device literal replaced by the CUDA device."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if _replacement(n.target) is None:
            return result
        # Only the backward reads statistics, in the layout of the forward; the others keep the traced layout.
        return tuple(
            laid_out_in(value, like) if value.dim() == 4 else value
            for value, like in zip(result, n.meta["val"], strict=True)
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(_elsewhere(arg) for arg in args)
        kwargs = {name: _elsewhere(value) for name, value in kwargs.items()}
        if isinstance(target, OpOverload) and kwargs.get("device") is None and _makes_tensors(target, args, kwargs):
            kwargs["device"] = DEVICE
        replacement = _replacement(target)
        if replacement is not None:
            if (result := replacement(*args, **kwargs)) is None:
                raise CannotLower(f"GPUs have nothing like `{target}` for its dtypes and shapes")
            return result
        try:
            return super().call_function(target, args, kwargs)
        except (AssertionError, RuntimeError) as error:
            # Torch has no fake kernel for it, and would have run it.
            if isinstance(error.__context__, NotImplementedError):
                raise CannotLower(f"torch does not tell what operator `{target}` returns without running it") from error
            raise

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if isinstance(value, torch.Tensor):
            raise CannotLower(f"the graph closes over a tensor of shape {tuple(value.shape)}")
        return value


def _replacement(target: Any) -> Callable[..., Any] | None:
    """Return the replacement on CUDA devices of an operator that only CPUs have; None: there is none."""
    if not isinstance(target, OpOverload):
        return None
    schema = target._schema
    return MOVED.get(f"{schema.name}.{schema.overload_name or 'default'}")


def _elsewhere(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) and value.type == "cpu" else value


def _makes_tensors(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator takes a device, and no tensor that has one."""
    takes_device = any(argument.name == "device" for argument in target._schema.arguments)
    return takes_device and not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))


aten: Any = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default
_FUSED_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def captured_for_gpu(forward: ForwardCapture, functional: FunctionalCapture, *, grad: bool) -> FunctionalCapture:
    """Return a program's functional graph with the operators of GPUs and launches of Triton kernels.

    It is `functional`, where another capture would make the same. `CannotLower`: the program has Triton kernels, or
    custom operators that write to their arguments, and cannot be captured as the compiler takes these.
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
