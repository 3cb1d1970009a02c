"""Data-dependent numbers: turn the assumptions of a trace about them into checks in its graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ConvertIntKey, ShapeEnv, free_unbacked_symbols
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges

from aotexport.process.patches import Patch, patched

_TORCH_CHECK = re.compile(r"Runtime assertion failed for expression (.*) on node '\w+'")


def is_data_dependent(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Return whether a symbolic number depends on the values of tensors."""
    return bool(free_unbacked_symbols(number.node.expr))


def follows_values(size: int | torch.SymInt) -> bool:
    """Return whether a size is dynamic, in a trace whose branches follow values; see `branches_follow`."""
    return isinstance(size, torch.SymInt) and bool(size.node.shape_env.real_tensor_prop_unbacked_vals)


def knows_data_dependent_numbers(shape_env: ShapeEnv) -> bool:
    """Return whether a trace met sizes or numbers that depend on the values of tensors."""
    return bool(free_unbacked_symbols(list(shape_env.var_to_range)))


def insert_data_dependent_checks(module: torch.fx.GraphModule, shape_env: ShapeEnv) -> None:
    """Insert checks of a trace's assumptions about data-dependent numbers into its graph."""
    if not knows_data_dependent_numbers(shape_env):
        return
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_select.default):
        # torch 2.13 bounds the count by the elements of the tensor before it is broadcast with the mask.
        shape_env.var_to_range[node.meta["val"].shape[0].node.expr] = ValueRanges(0, int_oo)
    for symbol in _equal_to_sizes(shape_env):
        # The range of the size, which the trace assumes to be above 1: its check compares the two.
        shape_env.var_to_range[symbol] = ValueRanges(0, int_oo)
    for symbol, _ in _truth_values(module.graph):
        # Truth values are always 0 or 1, which needs no check.
        shape_env.var_to_range[symbol] = ValueRanges(-int_oo, int_oo)
    _describe_checks(module.graph)
    insert_deferred_runtime_asserts(module, shape_env, "forward", export=True)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition, message = node.args
        told = _TORCH_CHECK.fullmatch(str(message))
        if told is not None:
            assumed = re.sub(r"\b(u|zuf)\d+\b", "value", told[1])
            node.args = (condition, f"the program needs `{assumed}` of a number that only the data know")


def _equal_to_sizes(shape_env: ShapeEnv) -> Iterator[Any]:
    """Yield the data-dependent symbols of which a trace assumes that each is equal to a size of the arguments."""
    for deferred in itertools.chain.from_iterable(shape_env.deferred_runtime_asserts.values()):
        free, data = deferred.expr.free_symbols, [*free_unbacked_symbols(deferred.expr)]
        if isinstance(deferred.expr, sympy.Eq) and len(free) > len(data) == 1 and data[0] in deferred.expr.args:
            yield data[0]


def line_of(guard: Any) -> str | None:
    """Return the user's line that caused a guard of a shape environment, as `fixed_symbols` recorded it."""
    return guard.sloc.maybe_user_loc


class _Answers(dict[Any, Any]):
    """Replaces `ShapeEnv.real_tensor_prop_unbacked_vals`: looks values up when asked for them."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self._get = get

    def __len__(self) -> int:
        return 1

    def __contains__(self, key: object) -> bool:
        return self[key] is not None

    def __getitem__(self, key: Any) -> Any:
        return self._get(key) if isinstance(key, sympy.Symbol) else None

    def get(self, key: Any, default: Any = None) -> Any:
        return default if (value := self[key]) is None else value


@contextlib.contextmanager
def branches_follow(
    shape_env: ShapeEnv, get: Callable[[Any], Any], decided: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Let code that branches on data-dependent numbers follow their values, which `get` returns by symbol.

    Torch would insert checks where the numbers are computed; `decided` inserts them instead. It is called with each
    expression that code branched on, and its value.
    """
    defer, ranges = shape_env.guard_or_defer_runtime_assert, shape_env.var_to_range
    narrowed: dict[Any, tuple[Any, Any]] = {}

    def defer_but_branches(expression: Any, message: str, **node: Any) -> bool:
        if not message.startswith("propagate_real_tensors"):
            return defer(expression, message, **node)
        old = {symbol: ranges[symbol] for symbol in expression.free_symbols}
        holds = defer(expression, message, **node)
        for asserts in shape_env.deferred_runtime_asserts.values():
            asserts[:] = [deferred for deferred in asserts if deferred.msg != message]
        for symbol, range_ in old.items():
            first, last = narrowed.get(symbol, (range_, range_))
            narrowed[symbol] = (first if last == range_ else range_), ranges[symbol]
        return holds

    reason = "Let branches over values follow the example"
    try:
        with patched(
            Patch(shape_env, "real_tensor_prop_unbacked_vals", _Answers(get), reason),
            Patch(shape_env, "_log_real_tensor_propagation", decided, reason),
            Patch(shape_env, "guard_or_defer_runtime_assert", defer_but_branches, reason),
        ):
            yield
    finally:
        # Drop ranges narrowed by branches: their checks cover them.
        ranges.update({symbol: first for symbol, (first, last) in narrowed.items() if ranges[symbol] == last})


def find_symbol(graph: torch.fx.Graph, symbol: Any) -> tuple[torch.fx.Node, Any] | None:
    """Return the node whose result holds a data-dependent symbol, with the path to it; None: no node does."""
    for node in reversed(graph.nodes):
        path = _bindings(node).get(symbol)
        if path is not None:
            return node, path
    return None


def number_at(value: Any, path: Any) -> Any:
    """Return the number at `path` in the result of a node, for use in expressions."""
    return sympy.sympify(functools.reduce(lambda found, key: key.get(found), path, value))


def is_float_of_tensors(expression: Any, value: Any) -> bool:
    """Return whether an expression with this value is a float computed from floats of tensors."""
    symbols: Any = free_unbacked_symbols(expression)
    floats = [symbol for symbol in symbols if not symbol.is_integer]
    return bool(floats) and not value.is_Boolean and not expression.is_integer


def add_check(graph: torch.fx.Graph, expression: Any, value: Any, message: str, stack_trace: str) -> None:
    """Append the check that an expression of data-dependent symbols has this value.

    `graph` is of the current trace, and defines the symbols. `message` is for the error of a call with another value,
    `stack_trace` of the code that depends on it.
    """
    tracer = GraphAppendingTracer(graph)
    before = set(graph.nodes)
    truth = next((node for symbol, node in _truth_values(graph) if expression == sympy.Eq(symbol, 1)), None)
    if truth is not None:
        condition: Any = torch.fx.Proxy(truth, tracer)
    else:
        proxies = {symbol: torch.fx.Proxy(_number(graph, symbol), tracer) for symbol in expression.free_symbols}
        condition = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    if value == sympy.false:
        condition = torch.sym_not(condition)
    elif value != sympy.true:
        condition = condition == (int(value) if value.is_Integer else float(value))
    graph.call_function(torch.ops.aten._assert_scalar.default, (condition.node, message))
    for node in graph.nodes:
        if node not in before:
            node.meta.update(stack_trace=stack_trace, checks=True)


def _truth_values(graph: torch.fx.Graph) -> Iterator[tuple[Any, torch.fx.Node]]:
    """Yield the data-dependent symbols that are 1 where a truth value is true, with the nodes that compute it."""
    for node in graph.nodes:
        for symbol, path in _bindings(node).items():
            if any(isinstance(key, ConvertIntKey) for key in path):
                yield symbol, node


def _number(graph: torch.fx.Graph, symbol: Any) -> torch.fx.Node:
    """Return a node whose result is a symbol, new if need be; a `LookupError` tells that none has it."""
    found = find_symbol(graph, symbol)
    if found is None:
        for node in graph.find_nodes(op="placeholder"):
            for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return graph.create_size_node(node, axis)
        raise LookupError(f"no input has the size {symbol}")
    return graph._resolve_unbacked_binding(found[0], tuple(found[1]), lower_symint=int)


def unchecked_assumption(
    forward: torch.fx.GraphModule, functional: torch.fx.GraphModule, shape_env: ShapeEnv
) -> Any | None:
    """Return an assumption about data-dependent numbers that only the trace of the functional graph made.

    It is an expression over the forward graph's symbols; None: there is none. The functional graph is traced from the
    forward graph: it has the checks of that, and its nodes tell their origin.
    """
    symbols = {(node.name, str(path)): s for node in forward.graph.nodes for s, path in _bindings(node).items()}
    same = {
        symbol: symbols.get(((node.meta.get("custom") or {}).get("origin", ""), str(path)), symbol)
        for node in functional.graph.nodes
        for symbol, path in _bindings(node).items()
    }
    for symbol in same:
        for deferred in shape_env.deferred_runtime_asserts.get(symbol, ()):
            if free_unbacked_symbols(deferred.expr) <= same.keys():
                expression = deferred.expr.xreplace(same)
                if shape_env._maybe_evaluate_static(expression) != sympy.true:
                    return expression
    return None


def _bindings(node: torch.fx.Node) -> dict[Any, Any]:
    """Return the data-dependent symbols that the result of a node introduces, with the path to each."""
    return node.meta.get("unbacked_bindings") or {}


def _describe_checks(graph: torch.fx.Graph) -> None:
    """Give the nodes that compute the conditions of checks the metadata of traced nodes."""
    for node in graph.nodes:
        if node.meta.pop("checks", False):
            args = torch.fx.map_arg(node.args, lambda arg: arg.meta["val"])
            node.meta["val"] = node.target(*args)
