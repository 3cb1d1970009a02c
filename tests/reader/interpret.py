"""Section 7: graphs, node by node."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.reader.bundle import Refused
from tests.reader.rules import Rules
from tests.reader.values import argument, dtype, references


class Unread(Exception):
    """What this reader leaves to others."""


class CallFails(RuntimeError):
    """A call that the text says to fail."""


_TABLE = Path(__file__).parents[2] / "runtimes/python/aotexport_runtime/allowed/dtypes.txt"
_WORDS = (line.partition(": ") for line in _TABLE.read_text(encoding="ascii").splitlines() if line[0] != "#")
DTYPES = {name for word, _, names in _WORDS if word not in ("each", "masked") for name in names.split()}
"""Base names of operators whose results have a dtype by rule (7.31), whatever the dtypes of the arguments are."""


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

    def __init__(self, graph: dict[str, Any], symbols: dict[str, int], rules: Rules) -> None:
        """Run `graph` for these values of its program's symbols."""
        self.graph, self.symbols, self.rules = graph, symbols, rules
        casts = any(node["op"] == "torch::enter_autocast" for node in graph["nodes"])
        self._is_cast = casts or torch.is_autocast_enabled("cpu")

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the graph; inputs are bound by position."""
        values = dict(zip((each["name"] for each in self.graph["inputs"]), inputs, strict=True))
        self.nodes(self.graph["nodes"], values)
        return [argument(each, values, self.symbols) for each in self.graph["outputs"]]

    def nodes(self, nodes: Iterable[dict[str, Any]], values: dict[str, Any]) -> None:
        """Run nodes in order; each adds its value."""
        for node in nodes:
            values[node["name"]] = self.call(node, values)

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
        found = function(*args, **kwargs if self.rules("graph.kwargs") else {})
        if base in DTYPES and self.rules("graph.dtype") and not self._is_cast:
            compare_dtypes(found, node["meta"])
        return found

    def unread(self, *args: Any) -> Any:
        """Refuse an operator."""
        raise Unread("a higher-order operator")

    def effect(self, name: str, args: list[Any]) -> Any:
        """Change the interpreter's state."""
        if name == "is_grad_enabled":
            return torch.is_grad_enabled()
        if name == "set_grad_enabled" and self.rules("effect.grad_mode"):
            torch.set_grad_enabled(bool(args[0]))
        if name == "enter_autocast":
            device, dtype, enabled, cache = args
            on = enabled and self.rules("effect.autocast")
            region = torch.autocast(device.type, dtype=dtype, enabled=on, cache_enabled=cache)
            region.__enter__()
            return region
        if name == "exit_autocast":
            args[0].__exit__(None, None, None)
        # A checkpointed part computes what it computes; memory is all that differs.
        return None

    def body(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        """Run a subgraph on its own inputs."""
        graph = self.graph["subgraphs"][name]
        inputs = inputs if self.rules("graph.subgraph_inputs") else list(reversed(inputs))
        return Interpreter(graph, self.symbols, self.rules).run(inputs)

    def cond(self, predicate: Any, a: str, b: str, operands: list[Any]) -> list[Any]:
        taken = bool(predicate) if self.rules("body.cond") else not predicate
        return self._reaching(self.body(a if taken else b, operands), operands)

    def _reaching(self, found: list[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the results with zeros added as gradients of all operands."""
        if not (torch.is_grad_enabled() and self.rules("body.cond_zeros")):
            return found
        zeros = [(each * 0).sum() for each in operands if isinstance(each, torch.Tensor) and each.requires_grad]
        is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in found]
        return [each + sum(zeros) if zeros and ok else each for each, ok in zip(found, is_float, strict=True)]

    def while_loop(self, condition: str, b: str, carried: list[Any], additional: list[Any]) -> list[Any]:
        found = [each[-1] for each in self._steps(condition, b, carried, additional)]
        if all(value is each for value, each in zip(found, carried, strict=True)):
            found = self._without_a_step(b, carried, additional)
        return self._reaching(found, [*carried, *additional])

    def _without_a_step(self, b: str, carried: list[Any], additional: list[Any]) -> list[Any]:
        """Return copies of the carried values, with the gradients of one step."""
        copies = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in carried]
        if not (torch.is_grad_enabled() and self.rules("body.loop_gradients")):
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
        if not self.rules("body.loop_gradients"):
            return values
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

    def _slices(self, xs: list[Any]) -> range:
        counts = {each.shape[0] for each in xs}
        if self.rules("body.slices") and (len(counts) != 1 or 0 in counts):
            raise CallFails("a loop over slices")
        return range(xs[0].shape[0])

    def map_impl(self, b: str, xs: list[Any], additional: list[Any]) -> list[Any]:
        found = [self.body(b, [*(x[step] for x in xs), *additional]) for step in self._slices(xs)]
        return self._reaching([torch.stack(each) for each in zip(*found, strict=True)], [*xs, *additional])

    def invoke_subgraph(self, b: str, operands: list[Any]) -> list[Any]:
        return self.body(b, operands)

    def register_hook(self, b: str, tensor: torch.Tensor, additional: list[Any]) -> None:
        if tensor.requires_grad and self.rules("body.hook"):
            tensor.register_hook(lambda gradient: self.body(b, [gradient, *additional])[0])

    def autograd_function(
        self, f: str, bodies: list[Any], operands: list[Any], additional: list[Any], *rest: Any
    ) -> Any:
        return list(_Function.apply(self, f, bodies, additional, rest, *operands))


class _Function(torch.autograd.Function):
    """`autograd_function`: a function with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any, own: Interpreter, f: str, bodies: list[Any], additional: Any, rest: Any, *operands: Any
    ) -> Any:
        outputs, saved, dirty, nondifferentiable, materializes, _once = rest
        found = own.body(f, [*operands, *additional])
        ctx.save_for_backward(*found[outputs : outputs + saved])
        ctx.kept, ctx.own, ctx.bodies, ctx.additional = found[outputs + saved :], own, bodies, additional
        ctx.differentiable = [index for index in range(outputs) if index not in nondifferentiable]
        ctx.materializes, ctx.count = materializes, len(operands)
        ctx.set_materialize_grads(materializes)
        ctx.mark_dirty(*(operands[index] for index in dirty))
        ctx.mark_non_differentiable(*(found[index] for index in nondifferentiable))
        return tuple(found[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
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


def is_random(node: dict[str, Any]) -> bool:
    """Return whether a node draws random numbers."""
    namespace, _, name = node["op"].partition("::")
    if namespace != "aten":
        return False
    base, _, overload = name.partition(".")
    return torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, base), overload).tags


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
