"""A functional graph, traced again on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.lower.cuda.attention import MOVED
from aotexport.torch_internals.calls import FakeTensor, FakeTensorMode
from aotexport.torch_internals.inductor import retraced
from aotexport.torch_internals.names import OpOverload

DEVICE = torch.device("cuda:0")

_CPU_ONLY = ("_for_cpu", "mkldnn", "onednn", "_cpu")


class CannotLower(ExportFailed):
    """A program cannot be lowered; the message says why, in a sentence without a full stop."""


def retarget(module: torch.fx.GraphModule, tangents: int, mode: FakeTensorMode) -> torch.fx.GraphModule:
    """Return `module` on CUDA tensors, its operators decomposed for the compiler.

    The last `tangents` of its inputs are incoming gradients; `mode` is the fake mode of its values.

    Raises:
        CannotLower: it has operators that only CPUs have, or changes values in place.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode:
        moved = [_moved(value) for value in inputs]
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


def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


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
            return replacement(*args, **kwargs)
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
    if not any(argument.name == "device" for argument in target._schema.arguments):
        return False
    return not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
