"""Section 7: graphs, node by node."""

import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

from tests.reader.bundle import Refused
from tests.reader.values import argument, dtype, references


class Unread(Exception):
    """What this reader leaves to others."""


class CallFails(RuntimeError):
    """A call that the text says to fail."""


_TABLE = Path(__file__).parents[2] / "schemas/v1/operators.json"
_ROWS = [row for rows in json.loads(_TABLE.read_text(encoding="utf-8"))["sets"].values() for row in rows]
_NAMES = [row["signature"].partition("(")[0] for row in _ROWS]
OPERATORS = {name if "." in name else f"{name}.default": row for name, row in zip(_NAMES, _ROWS, strict=True)}
"""Rows of the operators of `aten` (7.25), by full name."""


def _has_dtype(name: str) -> bool:
    """Return whether the results of an operator have a dtype by rule (7.33), whatever dtypes its arguments have."""
    return OPERATORS.get(f"aten::{name}", {}).get("dtypes", "each") not in ("each", "masked")


def compare_dtypes(found: Any, meta: dict[str, Any]) -> None:
    """Refuse results of other dtypes than their metadata have (7.31)."""
    if meta["kind"] == "sequence":
        for each, said in zip(found, meta["items"], strict=True):
            compare_dtypes(each, said)
    elif meta["kind"] == "tensor" and isinstance(found, torch.Tensor) and found.dtype != dtype(meta["dtype"]):
        raise Refused("result-type")


def compare_outputs(graph: dict[str, Any], outputs: Sequence[Any], said: Sequence[Any]) -> None:
    """Refuse outputs that are no tensors where the program has metadata, or no numbers elsewhere (7.4)."""
    metas = {value["name"]: value["meta"] for value in (*graph["inputs"], *graph["nodes"])}
    for output, meta in zip(outputs, said, strict=False):
        found = metas[output] if isinstance(output, str) else output
        kind = found["kind"] if isinstance(found, dict) else type(found).__name__
        if kind not in (("size", "scalar", "int", "bool", "float") if meta is None else ("tensor",)):
            raise Refused("result-type")


_FLOATS = ("sqrt", "log2", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan")
PYTHON: dict[str, Any] = {
    **{name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "xor", "lshift", "rshift")},
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "neg": operator.neg,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "round_digits": round,
    **{name: getattr(math, name) for name in _FLOATS},
    "sym_int": int,
    "sym_float": float,
    "sym_min": min,
    "sym_max": max,
    "sym_sum": sum,
    "sym_ite": lambda condition, a, b: a if condition else b,
}


class Interpreter:
    """Runs the nodes of one graph."""

    def __init__(self, graph: dict[str, Any], symbols: dict[str, int]) -> None:
        """Run `graph` for these values of its program's symbols."""
        self.graph, self.symbols = graph, symbols
        casts = any(node["op"] == "torch::enter_autocast" for node in graph["nodes"])
        self._regions: list[Any] = []
        self._is_cast = casts or torch.is_autocast_enabled("cpu")

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the graph; inputs are bound by position."""
        values = dict(zip((each["name"] for each in self.graph["inputs"]), inputs, strict=True))
        try:
            self.nodes(self.graph["nodes"], values)
        except BaseException:
            for region in reversed(self._regions):
                region.__exit__(None, None, None)
            raise
        return [argument(each, values, self.symbols) for each in self.graph["outputs"]]

    def nodes(self, nodes: Iterable[dict[str, Any]], values: dict[str, Any]) -> None:
        """Run nodes in order; each adds its value."""
        rest = iter(nodes)
        for node in rest:
            if node["op"] == "torch::enter_checkpoint":
                part = list(itertools.takewhile(lambda each: each["op"] != "torch::exit_checkpoint", rest))
                self.checkpoint(node, part, values)
                continue
            values[node["name"]] = self.call(node, values)

    def checkpoint(self, node: dict[str, Any], part: list[dict[str, Any]], values: dict[str, Any]) -> None:
        """Run a part that backward computes anew from the given tensors and what else it reads by then (7.11)."""
        given, is_repeated = node["args"]
        names = [each["name"] for each in part]

        def run(*tensors: Any) -> list[Any]:
            own = {**values, **dict(zip(given, tensors, strict=True))}
            self.nodes(part, own)
            return [own[name] for name in names]

        tensors = [values[name] for name in given]
        found = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=is_repeated)
        values.update(zip(names, found, strict=True))

    def call(self, node: dict[str, Any], values: dict[str, Any]) -> Any:
        """Return the result of a node."""
        args = [argument(each, values, self.symbols) for each in node.get("args", [])]
        kwargs = {key: argument(each, values, self.symbols) for key, each in node.get("kwargs", {}).items()}
        namespace, _, name = node["op"].partition("::")
        if namespace == "python":
            return PYTHON[name](*args)
        if namespace == "torch":
            return self.effect(name, args)
        if namespace == "higher_order":
            return getattr(self, name, self.unread)(*args)
        if namespace != "aten":
            raise Unread(node["op"])
        base, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, base), overload)
        found = function(*args, **kwargs)
        if _has_dtype(name) and not self._is_cast:
            compare_dtypes(found, node["meta"])
        return found

    def unread(self, *args: Any) -> Any:
        """Refuse an operator."""
        raise Unread("a higher-order operator")

    def effect(self, name: str, args: list[Any]) -> Any:
        """Change the interpreter's state."""
        if name == "is_grad_enabled":
            return torch.is_grad_enabled()
        if name == "set_grad_enabled":
            torch.set_grad_enabled(bool(args[0]))
        if name == "enter_autocast":
            device, dtype, enabled, cache = args
            region = torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cache)
            region.__enter__()
            self._regions.append(region)
            return region
        if name == "exit_autocast":
            self._regions.pop().__exit__(None, None, None)
        return None

    def body(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        """Run a subgraph on its own inputs."""
        graph = self.graph["subgraphs"][name]
        return Interpreter(graph, self.symbols).run(inputs)

    def cond(self, predicate: Any, a: str, b: str, operands: list[Any]) -> list[Any]:
        taken = a if predicate else b
        return self._reaching(self._drawn_again([taken], lambda *own: self.body(taken, own), operands), operands)

    def _drawn_again(self, bodies: Sequence[str], run: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
        """Run bodies; if they draw random numbers, backward runs them once more (7.17)."""
        draws = any(_draws(self.graph["subgraphs"][name]) for name in bodies)
        return list(_Again.apply(run, *operands)) if draws and torch.is_grad_enabled() else run(*operands)

    def _reaching(self, found: list[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the results with zeros added as gradients of all operands."""
        if not torch.is_grad_enabled():
            return found
        zeros = [(each * 0).sum() for each in operands if isinstance(each, torch.Tensor) and each.requires_grad]
        is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in found]
        return [each + sum(zeros) if zeros and ok else each for each, ok in zip(found, is_float, strict=True)]

    def while_loop(self, condition: str, b: str, carried: list[Any], additional: list[Any]) -> list[Any]:
        def run(*operands: Any) -> list[Any]:
            begin, rest = list(operands[: len(carried)]), list(operands[len(carried) :])
            return [each[-1] for each in self._steps(condition, b, begin, rest)]

        found = self._drawn_again([condition, b], run, [*carried, *additional])
        if all(value is each for value, each in zip(found, carried, strict=True)):
            found = self._without_a_step(b, carried, additional)
        return self._reaching(found, [*carried, *additional])

    def _without_a_step(self, b: str, carried: list[Any], additional: list[Any]) -> list[Any]:
        """Return copies of the carried values, with the gradients of one step."""
        copies = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in carried]
        if not torch.is_grad_enabled():
            return copies
        pairs = zip(copies, self.body(b, [*carried, *additional]), strict=True)
        return [copy + (after - after.detach()) if _has_history(after) else copy for copy, after in pairs]

    def while_loop_stack_output(self, condition: str, b: str, carried: list[Any], additional: list[Any]) -> list[Any]:
        return [torch.stack(each[1:] or each) for each in self._steps(condition, b, carried, additional)]

    def _steps(self, condition: str, b: str, carried: list[Any], additional: list[Any]) -> list[list[Any]]:
        history = [[each] for each in carried]
        while self.body(condition, [*carried, *additional])[0]:
            carried = self._cut(history, carried)
            carried = self.body(b, [*carried, *additional])
            for each, value in zip(history, carried, strict=True):
                each.append(value)
        return history

    def _cut(self, history: list[list[Any]], values: list[Any]) -> list[Any]:
        """Return what enters a step: detached where the value required no grad when the loop began."""
        began = [isinstance(each[0], torch.Tensor) and each[0].requires_grad for each in history]
        return [
            v if keeps or not isinstance(v, torch.Tensor) else v.detach()
            for v, keeps in zip(values, began, strict=True)
        ]

    def scan(self, b: str, carried: list[Any], xs: list[Any], additional: list[Any]) -> list[Any]:
        begin, collected = carried, list[list[Any]]()
        for step in self._slices(xs):
            found = self.body(b, [*carried, *(x[step] for x in xs), *additional])
            carried, y = found[: len(carried)], found[len(carried) :]
            collected.append(y)
        found = [*carried, *(torch.stack(each) for each in zip(*collected, strict=True))]
        return self._reaching(found, [*begin, *xs, *additional])

    def _slices(self, xs: Sequence[Any]) -> range:
        counts = {each.shape[0] for each in xs}
        if len(counts) != 1 or 0 in counts:
            raise CallFails("a loop over slices")
        return range(xs[0].shape[0])

    def map_impl(self, b: str, xs: list[Any], additional: list[Any]) -> list[Any]:
        def run(*operands: Any) -> list[Any]:
            own, rest = operands[: len(xs)], operands[len(xs) :]
            found = [self.body(b, [*(x[step] for x in own), *rest]) for step in self._slices(own)]
            return [torch.stack(each) for each in zip(*found, strict=True)]

        return self._reaching(self._drawn_again([b], run, [*xs, *additional]), [*xs, *additional])

    def invoke_subgraph(self, b: str, operands: list[Any]) -> list[Any]:
        return self.body(b, operands)

    def register_hook(self, b: str, tensor: torch.Tensor, additional: list[Any]) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.body(b, [gradient, *additional])[0])

    def autograd_function(
        self, f: str, bodies: list[Any], operands: list[Any], additional: list[Any], *rest: Any
    ) -> Any:
        return list(_Function.apply(self, f, bodies, additional, rest, *operands))


class _Again(torch.autograd.Function):
    """What is run in a call, and once more in backward, for the gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[Any]], *operands: Any) -> Any:
        ctx.run, ctx.operands = run, operands
        return tuple(run(*operands))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[1:]
        own = [x.detach().requires_grad_() if need else x for x, need in zip(ctx.operands, needs, strict=True)]
        with torch.enable_grad():
            pairs = zip(ctx.run(*own), grads, strict=True)
            flowing = [(found, grad) for found, grad in pairs if _has_history(found) and grad is not None]
        outputs, grads = zip(*flowing, strict=True)
        wanted = [x for x, need in zip(own, needs, strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return (None, *(next(found) if need else None for need in needs))


class _Function(torch.autograd.Function):
    """`autograd_function`: a function with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any, own: Interpreter, f: str, bodies: list[Any], additional: Any, rest: Any, *operands: Any
    ) -> Any:
        outputs, saved, dirty, nondifferentiable, materializes, once = rest
        found = own.body(f, [*operands, *additional])
        ctx.save_for_backward(*found[outputs : outputs + saved])
        ctx.kept, ctx.own, ctx.bodies, ctx.additional = found[outputs + saved :], own, bodies, additional
        ctx.differentiable = [index for index in range(outputs) if index not in nondifferentiable]
        ctx.materializes, ctx.once = materializes, once
        ctx.set_materialize_grads(materializes)
        ctx.mark_dirty(*(operands[index] for index in dirty))
        ctx.mark_non_differentiable(*(found[index] for index in nondifferentiable))
        return tuple(found[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (torch.autograd.function.once_differentiable(_gradients) if ctx.once else _gradients)(ctx, *grads)


def _gradients(ctx: Any, *grads: Any) -> Any:
    """Return the gradients of a `_Function`."""
    body, passed = ctx.bodies[0], list(grads)
    if not ctx.materializes:
        defined = [index for index in ctx.differentiable if grads[index] is not None]
        body = ctx.bodies[sum(1 << ctx.differentiable.index(index) for index in defined)]
        passed = [grads[index] for index in defined]
    if body is None:
        raise RuntimeError("the function fails for these gradients")
    found = ctx.own.body(body, [*passed, *ctx.saved_tensors, *ctx.kept, *ctx.additional])
    return (None, None, None, None, None, *found)


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _draws(graph: dict[str, Any]) -> bool:
    """Return whether a body, or one below, draws random numbers."""
    return any(map(is_random, graph["nodes"])) or any(map(_draws, graph.get("subgraphs", {}).values()))


def is_random(node: dict[str, Any]) -> bool:
    """Return whether a node draws random numbers."""
    return "random" in OPERATORS.get(node["op"], {})


def needed(nodes: Sequence[dict[str, Any]], names: Iterable[str], known: Iterable[str]) -> list[dict[str, Any]]:
    """Return the nodes that `names` depend on, in order, not looking behind `known`."""
    wanted, known = set(names), set(known)
    found: list[dict[str, Any]] = []
    for node in reversed(nodes):
        if node["name"] in wanted and node["name"] not in known:
            found.append(node)
            arguments = [*node.get("args", []), *node.get("kwargs", {}).values()]
            wanted.update(name for each in arguments for name in references(each))
    return found[::-1]
