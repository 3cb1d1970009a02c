"""Trace through custom operators written in Python, so that a bundle holds their computation, not their names.

An operator of `torch.library.custom_op` becomes a custom autograd function with its registered backward; without one,
a backward raises as in eager. An operator that writes to its arguments, or that was defined and implemented piece by
piece, is traced if autograd does not differentiate it: if no operand requires gradients, or it returns integers.
Operators that cannot be traced (compiled code, sizes and branches of values) stay, and a load needs their package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from aotexport.capture.effects.autograd_functions import record_application
from aotexport.capture.effects.watch import current_watch
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_frame
from aotexport.torch_internals.calls import tensors_in, tree_map
from aotexport.torch_internals.custom_operators import PythonOperator, filled, python_operators
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.outside import fresh_symbols_dropped
from aotexport.torch_internals.tracing import trace_subgraph, traces_above_autograd, tracing_paused

_kept_operators: ContextVar[tuple[str, ...]] = ContextVar("_kept_operators", default=())


@contextlib.contextmanager
def operators_kept(names: Iterable[str]) -> Iterator[None]:
    """Leave operators whole in the block, by their names (`library::operator`) or namespaces (`library`)."""
    token = _kept_operators.set(tuple(names))
    try:
        yield
    finally:
        _kept_operators.reset(token)


def is_kept(operator: OpOverload) -> bool:
    """Return whether the user asked to keep an operator."""
    name = operator._schema.name
    return name in _kept_operators.get() or name.partition("::")[0] in _kept_operators.get()


def custom_operators(graph: torch.fx.GraphModule) -> frozenset[str]:
    """Return the names of the custom operators in a graph that the user did not ask to keep."""
    found = (node.target for node in graph.graph.nodes if isinstance(node.target, OpOverload))
    names = {target._schema.name for target in found if not is_kept(target)}
    return frozenset(name for name in names if name.partition("::")[0] not in ("aten", "prims", "prim", "profiler"))


def traced_operators() -> Mapping[Any, Callable[..., Any]]:
    """Return the functions to trace in place of custom operators; they return NotImplemented to keep the operator."""
    found = {operator: _tracing(operator, described) for operator, described in python_operators().items()}
    return {operator: function for operator, function in found.items() if not is_kept(operator)}


def _tracing(operator: OpOverload, described: PythonOperator) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with current_watch.get(contextlib.nullcontext()):
            return trace(*args, **kwargs)

    def trace(*args: Any, **kwargs: Any) -> Any:
        if described.is_composite:
            return _STAYS if _dtypes(described.kernel, args, kwargs) is None else described.kernel(*args, **kwargs)
        args, kwargs = filled(operator, args, kwargs)
        if not traces_above_autograd():
            # Autograd sees the graph again when it runs, and would differentiate the kernel.
            return _STAYS
        if described.has_autograd and not operator._schema.is_mutable:
            return _as_function(operator, described, args, kwargs)
        dtypes = _dtypes(described.kernel, args, kwargs)
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        if dtypes is None or (needs_grad and any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)):
            return _STAYS
        with torch.no_grad():
            return described.kernel(*args, **kwargs)

    return watched


_STAYS = NotImplemented


def _as_function(operator: OpOverload, described: PythonOperator, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Record an operator as the custom autograd function of flat tensors that torch makes of it.

    Source: torch 2.13, torch/_library/autograd.py (`make_autograd_impl`, `supports_tensorlist`).
    """
    kernel, setup, backward = described.kernel, described.setup_context, described.backward
    form: list[Any] = []

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(*leaves: Any) -> Any:
            result = kernel(*_nested(leaves, args), **kwargs)
            form[:] = [result]
            return tuple(_flat(result if isinstance(result, tuple) else (result,)))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if setup is not None:
                more = {"keyword_only_inputs": kwargs} if kwargs else {}
                setup(ctx=ctx, inputs=_nested(inputs, args), output=form[0], **more)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if backward is None:
                torch.ops.aten._assert_async.msg(
                    torch.zeros((), dtype=torch.bool, device=grads[0].device),
                    f"Trying to backward through {operator} but no autograd formula was registered. "
                    "Please use register_autograd to add one.",
                )
                return (None,) * len(_flat(args))
            results = form[0] if isinstance(form[0], tuple) else (form[0],)
            if any(map(_is_list_of_tensors, args)):
                ctx.needs_input_grad = _nested(ctx.needs_input_grad, args)
            found = backward(ctx, *_nested(grads, results))
            return tuple(_flat(found if isinstance(found, tuple) else (found,)))

    Traced.__name__ = operator._schema.name
    with fresh_symbols_dropped():
        try:
            with attempt("custom operator"):
                outputs = record_application(Traced, tuple(_flat(args)), {})
        except ExportFailed:
            return _STAYS
    results = _nested(outputs, form[0] if isinstance(form[0], tuple) else (form[0],))
    return results if isinstance(form[0], tuple) else results[0]


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return values, with lists of tensors or of their gradients replaced by the items."""
    return [item for value in values for item in (value if _is_list_of_tensors(value) else [value])]


def _nested(leaves: Iterable[Any], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the leaves of `_flat` in lists again where `like` has lists of tensors."""
    own = iter(leaves)
    return tuple([next(own) for _ in value] if _is_list_of_tensors(value) else next(own) for value in like)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(item is None or isinstance(item, torch.Tensor) for item in value)


def _dtypes(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> set[torch.dtype] | None:
    """Return the dtypes of what the kernel of an operator returns, by a trace that is dropped; None: there is none."""
    operands = tensors_in((args, kwargs))
    dtypes = set[torch.dtype]()

    def run(*_: Any) -> list[Any]:
        twins = {id(tensor): tensor.clone() for tensor in operands}
        twin_args, twin_kwargs = tree_map(lambda leaf: twins.get(id(leaf), leaf), (args, kwargs))
        result = kernel(*twin_args, **twin_kwargs)
        dtypes.update(tensor.dtype for tensor in tensors_in(result))
        return tensors_in(result)

    with tracing_paused(), fresh_symbols_dropped():
        try:
            with attempt("custom operator"), torch.no_grad():
                trace_subgraph(run, operands, keeps_frame=is_user_frame)
        except ExportFailed:
            return None
    return dtypes
