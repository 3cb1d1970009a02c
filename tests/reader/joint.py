"""Section 10: a joint graph as one operation of autograd."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.reader.interpret import Interpreter, is_random, needed
from tests.reader.values import argument, dtype, references, size


def used_by(nodes: Sequence[dict[str, Any]], outputs: Sequence[Any]) -> set[str]:
    """Return the names that nodes and outputs refer to."""
    arguments = [each for node in nodes for each in [*node.get("args", []), *node.get("kwargs", {}).values()]]
    return {name for each in [*arguments, *outputs] for name in references(each)}


class Parts:
    """The forward and backward of the default partition, for the gradients that a call needs."""

    def __init__(self, own: Any, names: list[str], wanted: Sequence[bool]) -> None:
        graph, nodes, gradients = own.graph, own.graph["nodes"], own.gradients
        indices = [index if wants else None for index, wants in zip(gradients["of_inputs"], wanted, strict=True)]
        self.gradients = [None if index is None else graph["outputs"][index] for index in indices]
        kept = gradients["partitions"][0]["saved"]
        self.backward = needed(nodes, used_by([], self.gradients), {*kept, *names})
        used = used_by(self.backward, self.gradients)
        self.saved = [name for name in dict.fromkeys([*names[: len(wanted)], *kept]) if name in used]
        draws = [node["name"] for node in nodes if is_random(node)]
        self.outputs = graph["outputs"][: own.returned]
        self.forward = needed(nodes, [*used_by([], self.outputs), *self.saved, *draws], names)


class Joint(torch.autograd.Function):
    """The forward and backward of a partition."""

    @staticmethod
    def forward(
        ctx: Any, own: Any, interpreter: Interpreter, positions: list[int], box: dict[str, Any], *inputs: Any
    ) -> Any:
        names = [each["name"] for each in own.graph["inputs"]]
        values = dict(zip(names[: len(inputs)], inputs, strict=True))
        parts = Parts(own, names, ctx.needs_input_grad[4:])
        interpreter.nodes(parts.forward, values)
        ctx.saved_names = [name for name in parts.saved if isinstance(values[name], torch.Tensor)]
        unchecked = own.gradients["partitions"][0].get("unchecked", [])
        saved = [values[name].data if name in unchecked else values[name] for name in ctx.saved_names]
        ctx.others = {name: values[name] for name in parts.saved if name not in ctx.saved_names}
        ctx.repeats = bool(own.gradients.get("saves_nothing"))
        if ctx.repeats:
            ctx.others.update(zip(ctx.saved_names, saved, strict=True))
        else:
            ctx.save_for_backward(*saved)
        ctx.own, ctx.interpreter, ctx.count, ctx.parts = own, interpreter, len(inputs), parts
        wanted = zip(own.gradients["of_inputs"], ctx.needs_input_grad[4:], strict=True)
        ctx.whole = all(needed or place is None for place, needed in wanted)
        ctx.set_materialize_grads(False)
        found = [argument(each, values, interpreter.symbols) for each in parts.outputs]
        reached = used_by(parts.backward, parts.gradients)
        places = [place for place, name in zip(positions, names[len(inputs) :], strict=True) if name in reached]
        box["values"] = [each.detach() if isinstance(each, torch.Tensor) else each for each in found]
        box["places"], ctx.places, ctx.positions = places, places, positions
        ctx.shapes = {place: found[place].shape for place in positions}
        views = {len(own.mutations) + i for i, each in enumerate(own.outputs) if each.get("view") in _PROTECTED}
        fresh = [found[place].detach() for place in places]
        return tuple(each.view_as(each) if place in views else each for place, each in zip(places, fresh, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("a backward of the backward is not recorded")
        own, graph, symbols = ctx.own, ctx.own.graph, ctx.interpreter.symbols
        by_place = dict(zip(ctx.places, grads, strict=True))
        tangents = [by_place.get(place) for place in ctx.positions]
        saved = () if ctx.repeats else ctx.saved_tensors
        for tensor, version, of in getattr(ctx, "versions", ()):
            if tensor._version != version and any(tangents[each] is not None for each in of):
                raise RuntimeError("a tensor that the backward of eager reads was changed")
        if all(each is None for each in tangents):
            return (None,) * (4 + ctx.count)
        values: dict[str, Any] = {**ctx.others, **dict(zip(ctx.saved_names, saved, strict=False))}
        names = [each["name"] for each in graph["inputs"]][ctx.count :]
        steps = _Backward(ctx.interpreter, graph, own.is_sized_by_data)
        for name, spec, tangent, place in zip(names, own.gradients["tangents"], tangents, ctx.positions, strict=True):
            steps.late.add(name)
            if tangent is not None:
                values[name] = laid_out(tangent, spec, symbols)
                continue
            steps.undefined.add(name)
            if own.is_sized_by_data:
                values[name] = torch.zeros(ctx.shapes[place], dtype=dtype(spec["meta"]["dtype"]))
        for node in ctx.parts.backward:
            steps.run(node, values)
        found = [
            None if each is None or each in steps.undefined else argument(each, values, symbols)
            for each in ctx.parts.gradients
        ]
        return (None, None, None, None, *found)


_PROTECTED = ("custom_function", "multi_output")
"""Views that autograd lets nobody change."""


def laid_out(grad: torch.Tensor, tangent: dict[str, Any], symbols: dict[str, int]) -> torch.Tensor:
    """Return an incoming gradient as the graph takes it (10.18)."""
    if tangent.get("memory_format") is not None:
        return grad.contiguous(memory_format=getattr(torch, tangent["memory_format"]))
    stride = tuple(size(each, symbols) for each in tangent["stride"])
    if grad.stride() == stride:
        return grad
    if _overlaps(grad.shape, stride):
        return grad.contiguous()
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype).copy_(grad)


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of such sizes and strides share memory."""
    reach = 0
    for step, count in sorted((step, count) for step, count in zip(stride, shape, strict=True) if count > 1):
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


class _Backward:
    """Runs nodes of a backward; undefined tangents are no zeros (10.22 to 10.25)."""

    def __init__(self, interpreter: Interpreter, graph: dict[str, Any], is_sized_by_data: bool) -> None:
        self.interpreter, self._is_filled = interpreter, is_sized_by_data
        self.metas = {each["name"]: each["meta"] for each in [*graph["inputs"], *graph["nodes"]]}
        self.undefined: set[str] = set()
        self.late: set[str] = set()

    def run(self, node: dict[str, Any], values: dict[str, Any]) -> None:
        """Add the value of a node, or note that it is undefined."""
        used, name = used_by([node], []), node["name"]
        if used & self.late:
            self.late.add(name)
        missing = used & self.undefined
        if missing and not (used & self.late) - self.undefined:
            self.undefined.add(name)
            if not self._is_filled:
                return
        filled = values
        if missing and not self._is_filled:
            other = self._addend(node, values, used - missing)
            if other is not None:
                values[name] = other
                return
            filled = {**values, **{each: self.zeros(each) for each in missing}}
        values[name] = self.interpreter.call(node, filled)

    def _addend(self, node: dict[str, Any], values: dict[str, Any], defined: set[str]) -> torch.Tensor | None:
        """Return the defined operand of a sum with an undefined one, where it is of the sum's metadata (10.23)."""
        if node["op"] != "aten::add.Tensor" or len(node["args"]) != 2 or node.get("kwargs"):
            return None
        (other,), meta = defined, node["meta"]
        shape = [size(each, self.interpreter.symbols) for each in meta["shape"]]
        alike = list(values[other].shape) == shape and values[other].dtype == dtype(meta["dtype"])
        return values[other] if alike else None

    def zeros(self, name: str) -> torch.Tensor:
        meta = self.metas[name]
        shape = [size(each, self.interpreter.symbols) for each in meta["shape"]]
        return torch.zeros(shape, dtype=dtype(meta["dtype"]))
