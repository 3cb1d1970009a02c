"""Section 10: functional graphs, with autograd and the epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.reader.interpret import Interpreter, is_random, needed
from tests.reader.rules import Rules
from tests.reader.values import argument, dtype, references, size


class Functional:
    """The functional graph of one program."""

    def __init__(self, program: dict[str, Any], graph: dict[str, Any], rules: Rules) -> None:
        """Prepare the graph of a program."""
        self.program, self.graph, self.rules = program, graph, rules
        self.record = program["functional"]
        self.mutations = self.record.get("mutations", [])
        self.outputs = self.record["outputs"]
        self.gradients = self.record.get("gradients")
        self._strides_anew = any(node["op"].startswith("aten::as_strided") for node in graph["nodes"])
        self.returned = len(self.mutations) + len(self.outputs) + self.record.get("intermediate_bases", 0)

    def serves(self, inputs: Sequence[Any], symbols: dict[str, int]) -> bool:
        """Return whether the soft guards hold (10.3, but for transforms and hooks, which no replay has)."""
        detached = [] if self.gradients is None else self.gradients.get("detached_inputs", [])
        tensors = [
            each for index, each in enumerate(inputs) if isinstance(each, torch.Tensor) and index not in detached
        ]
        records = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        if records != (self.gradients is not None) or torch.is_autocast_enabled("cpu"):
            return False
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
            return False
        read = [(inputs[each["input_index"]], each["symbol"]) for each in self.program.get("dimensions", [])]
        if any(isinstance(source, torch.Tensor) and symbols[symbol] == 0 for source, symbol in read):
            return False
        if not all(size(each, symbols) for each in self.record.get("guards", [])):
            return False
        for spec, value in zip(self.program["inputs"], inputs, strict=True):
            if spec["kind"] == "size":
                continue
            meta = spec["meta"]
            if self._strides_anew and value.storage_offset() != size(meta.get("offset", 0), symbols):
                return False
            if self.gradients is not None and value.requires_grad and not meta.get("requires_grad", False):
                return False
            steps = zip(value.stride(), meta["stride"], value.shape, strict=True)
            if any(step != size(said, symbols) for step, said, count in steps if count > 1):
                return False
        return all(self._may_change(each, inputs, symbols) for each in self.mutations)

    def _may_change(self, mutation: dict[str, Any], inputs: Sequence[Any], symbols: dict[str, int]) -> bool:
        index = mutation["input_index"]
        spec, tensor = self.program["inputs"][index], inputs[index]
        pointer = tensor.untyped_storage().data_ptr()
        others = [each for i, each in enumerate(inputs) if i != index and isinstance(each, torch.Tensor)]
        if pointer and any(each.untyped_storage().data_ptr() == pointer for each in others):
            return False
        if mutation.get("requires_grad") and spec["kind"] == "argument" and self.gradients is not None:
            return tensor.is_leaf == mutation.get("is_leaf", True)
        bases = [o["input_index"] for o in self.outputs if o["kind"] == "input_alias" and o.get("steps") is None]
        offset = size(spec["meta"].get("offset", 0), symbols)
        moved = mutation.get("data") and (mutation.get("metadata") or index in bases)
        return not moved or tensor.storage_offset() == offset

    def run(self, inputs: Sequence[Any], symbols: dict[str, int]) -> list[Any]:
        """Return `Program.outputs` after the epilogues."""
        interpreter = Interpreter(self.graph, symbols, self.rules)
        if self.gradients is None:
            with torch.no_grad():
                found = interpreter.run(inputs)
        else:
            found = self._joint(inputs, interpreter)
        rises = {each["input_index"]: each["by"] for each in self.record.get("version_rises", [])}
        rises = rises if self.rules("mutation.versions") else {}
        for mutation, new in zip(self.mutations, found, strict=False):
            index = mutation["input_index"]
            own = sum(mutation.get(kind, False) for kind in ("data", "metadata", "storage"))
            by = rises.pop(index, own)
            self._change(mutation, inputs[index], new, quiet=by < own)
            rises[index] = by - own + (by < own)
        for index, by in rises.items():
            for _ in range(0 if inputs[index].is_inference() else by):
                torch.autograd.graph.increment_version(inputs[index])
        results = self._outputs(inputs, found)
        if self.gradients is not None:
            self._remember(inputs, results, found)
        mode = self.record.get("grad_mode")
        if mode is not None and self.rules("output.grad_mode"):
            torch.set_grad_enabled(mode)
        return results

    # --- a joint graph as one operation of autograd -------------------------------------------------------

    def _joint(self, inputs: Sequence[Any], interpreter: Interpreter) -> list[Any]:
        detached = self.gradients.get("detached_inputs", []) if self.rules("gradient.detached") else []
        passed = [each.detach() if index in detached else each for index, each in enumerate(inputs)]
        positions = [self._position(tangent) for tangent in self.gradients["tangents"]]
        box: dict[str, Any] = {}
        differentiable = _Joint.apply(self, interpreter, positions, box, *passed)
        found = list(box["values"])
        for position, value in zip(box["places"], differentiable, strict=True):
            found[position] = value
        return found

    def _position(self, tangent: dict[str, Any]) -> int:
        before = {"mutation": 0, "output": len(self.mutations), "intermediate_base": len(self.mutations + self.outputs)}
        return before[tangent["of"]] + tangent["index"]

    # --- epilogues ----------------------------------------------------------------------------------------

    def _change(self, mutation: dict[str, Any], tensor: torch.Tensor, new: torch.Tensor, *, quiet: bool) -> None:
        hidden = mutation.get("under_no_grad", False) and self.rules("mutation.no_grad")
        if mutation.get("storage"):
            if quiet:
                tensor.data = new
                return
            with torch.no_grad():
                tensor.set_(new)
            return
        if mutation.get("metadata") and self.rules("mutation.metadata"):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not hidden):
                tensor.as_strided_(new.size(), new.stride(), new.storage_offset())
        if not mutation.get("data") or not self.rules("mutation.data"):
            return
        if quiet:
            tensor.data.copy_(new)
        elif hidden or (mutation.get("is_leaf", True) and tensor.requires_grad) or not self.rules("mutation.recorded"):
            with torch.no_grad():
                tensor.copy_(new)
        else:
            tensor.copy_(new)

    def _remember(self, inputs: Sequence[Any], results: Sequence[Any], found: Sequence[Any]) -> None:
        """Note the versions that the backward compares (10.20)."""
        node = next((each.grad_fn for each in found if isinstance(each, torch.Tensor) and each.grad_fn), None)
        if node is None or not self.rules("gradient.checks"):
            return
        tensors = {"input": inputs, "output": [_detached(each) for each in results]}
        checks = self.gradients.get("checks", [])
        node.versions = [
            (tensors[each["of"]][each["index"]], tensors[each["of"]][each["index"]]._version, each["tangents"])
            for each in checks
        ]

    def _outputs(self, inputs: Sequence[Any], found: list[Any]) -> list[Any]:
        through = self._through() if self.rules("output.alias_through") else {}
        alone = {i: self._output(spec, i, inputs, found) for i, spec in enumerate(self.outputs) if i not in through}
        while len(alone) < len(self.outputs):
            for index, other in through.items():
                if index not in alone and other in alone:
                    alone[index] = self._part(index, other, alone[other], found[len(self.mutations) + index])
        return [alone[index] for index in range(len(self.outputs))]

    def _through(self) -> dict[int, int]:
        """Return, per alias that goes through another one, the other (10.14)."""
        flowing = [
            index
            for index, each in enumerate(self.outputs)
            if each["kind"].endswith("alias") and each.get("requires_grad") and not each.get("under_no_grad")
        ]
        names = {self.graph["outputs"][len(self.mutations) + index]: index for index in flowing}
        sources = {node["name"]: references(node.get("args", [None])[0]) for node in self.graph["nodes"]}
        found: dict[int, int] = {}
        for name, index in names.items():
            at = sources.get(name)
            while at and at[0] not in names:
                at = sources.get(at[0])
            if at and self._begins(self.outputs[names[at[0]]], self.outputs[index]):
                found[index] = names[at[0]]
        return found

    def _begins(self, other: dict[str, Any], own: dict[str, Any]) -> bool:
        bases = [
            (each["kind"], each.get("input_index"), each.get("base_index"), each.get("output_index"))
            for each in (other, own)
        ]
        first, steps = other.get("steps"), own.get("steps")
        return bases[0] == bases[1] and (first is None or steps is None or steps[: len(first)] == first)

    def _part(self, index: int, other: int, base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        first, steps = self.outputs[other].get("steps"), self.outputs[index].get("steps")
        left = None if first is None or steps is None else steps[len(first) :]
        return self._alias({**self.outputs[index], "steps": left}, base, value, True)

    def _output(self, spec: dict[str, Any], index: int, inputs: Sequence[Any], found: list[Any]) -> Any:
        value = found[len(self.mutations) + index]
        kind = spec["kind"]
        if kind == "input":
            return inputs[spec["input_index"]] if self.rules("output.input") else inputs[spec["input_index"]].clone()
        if kind == "fresh":
            flows = isinstance(value, torch.Tensor) and not value.requires_grad and spec.get("requires_grad", False)
            if flows and self.gradients is not None and self.rules("output.without_tangent"):
                return value.detach().requires_grad_(True)
            return value
        if not self.rules("output.alias"):
            return value
        if kind == "input_alias":
            base, required = inputs[spec["input_index"]], self._input_required(spec["input_index"])
        elif kind == "intermediate_alias":
            base = found[len(self.mutations) + len(self.outputs) + spec["base_index"]]
            tangents = [] if self.gradients is None else self.gradients["tangents"]
            required = ("intermediate_base", spec["base_index"]) in [(each["of"], each["index"]) for each in tangents]
        else:
            base = found[len(self.mutations) + spec["output_index"]]
            required = self.outputs[spec["output_index"]].get("requires_grad", False)
        return self._alias(spec, base, value, required)

    def _input_required(self, index: int) -> bool:
        return self.program["inputs"][index]["meta"].get("requires_grad", False)

    def _alias(self, spec: dict[str, Any], base: torch.Tensor, value: torch.Tensor, required: bool) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.get("under_no_grad", False)):
            made = base
            for step in spec.get("steps") or ():
                namespace, _, name = step["op"].partition("::")
                operator, _, overload = name.partition(".")
                args = [argument(each, {}, {}) for each in step.get("args", [])]
                made = getattr(getattr(getattr(torch.ops, namespace), operator), overload)(made, *args)
                made = made if step.get("item") is None else made[step["item"]]
            if spec.get("steps") is None or made.shape != value.shape:
                made = _in_dtype(base, value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())
        wants = spec.get("requires_grad", False)
        if wants == required:
            return made
        if base.requires_grad and not wants and self.rules("output.alias_detached"):
            return made.detach()
        if wants and not base.requires_grad and torch.is_grad_enabled():
            made.requires_grad_(True)
        return made


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _in_dtype(base: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    if base.dtype == wanted:
        return base
    if base.is_complex() and not wanted.is_complex:
        return torch.view_as_real(base)
    return torch.view_as_complex(base) if wanted.is_complex and not base.is_complex() else base.view(wanted)


def _used(nodes: Sequence[dict[str, Any]], outputs: Sequence[Any]) -> set[str]:
    """Return the names that nodes and outputs refer to."""
    arguments = [each for node in nodes for each in [*node.get("args", []), *node.get("kwargs", {}).values()]]
    return {name for each in [*arguments, *outputs] for name in references(each)}


class _Parts:
    """The forward and backward of the default partition, for the gradients that a call needs."""

    def __init__(self, own: Functional, names: list[str], wanted: Sequence[bool]) -> None:
        graph, nodes, gradients = own.graph, own.graph["nodes"], own.gradients
        indices = [index if wants else None for index, wants in zip(gradients["of_inputs"], wanted, strict=True)]
        self.gradients = [None if index is None else graph["outputs"][index] for index in indices]
        kept = gradients["partitions"][0]["saved"]
        self.backward = needed(nodes, _used([], self.gradients), {*kept, *names})
        used = _used(self.backward, self.gradients)
        self.saved = [name for name in dict.fromkeys([*names[: len(wanted)], *kept]) if name in used]
        draws = [node["name"] for node in nodes if is_random(node)] if own.rules("random.order") else []
        self.outputs = graph["outputs"][: own.returned]
        self.forward = needed(nodes, [*_used([], self.outputs), *self.saved, *draws], names)


class _Joint(torch.autograd.Function):
    """The forward and backward of a partition."""

    @staticmethod
    def forward(
        ctx: Any, own: Functional, interpreter: Interpreter, positions: list[int], box: dict[str, Any], *inputs: Any
    ) -> Any:
        names = [each["name"] for each in own.graph["inputs"]]
        values = dict(zip(names[: len(inputs)], inputs, strict=True))
        parts = _Parts(own, names, ctx.needs_input_grad[4:])
        interpreter.nodes(parts.forward, values)
        unchecked = own.gradients["partitions"][0].get("unchecked", [])
        tensors = [name for name in parts.saved if isinstance(values[name], torch.Tensor)]
        ctx.saved_names = [name for name in tensors if name not in unchecked]
        ctx.save_for_backward(*(values[name] for name in ctx.saved_names))
        ctx.others = {name: values[name] for name in parts.saved if name not in ctx.saved_names}
        ctx.own, ctx.interpreter, ctx.count, ctx.parts = own, interpreter, len(inputs), parts
        ctx.set_materialize_grads(False)
        found = [argument(each, values, interpreter.symbols) for each in parts.outputs]
        flows = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in found]
        places = positions if own.rules("gradient.nondifferentiable") else [i for i, flow in enumerate(flows) if flow]
        box["values"] = [each.detach() if isinstance(each, torch.Tensor) else each for each in found]
        box["places"], ctx.places, ctx.positions = places, places, positions
        return tuple(found[place].detach() for place in places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        own, graph = ctx.own, ctx.own.graph
        by_place = dict(zip(ctx.places, grads, strict=True))
        for tensor, version, tangents in getattr(ctx, "versions", ()):
            if tensor._version != version and any(by_place[ctx.positions[each]] is not None for each in tangents):
                raise RuntimeError("a tensor that the backward of eager reads was changed")
        names = [each["name"] for each in graph["inputs"]]
        values: dict[str, Any] = {**ctx.others, **dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))}
        undefined: set[str] = set()
        late: set[str] = set()
        for name, tangent, place in zip(names[ctx.count :], own.gradients["tangents"], ctx.positions, strict=True):
            values[name] = own_tangent(own, tangent, by_place[place], ctx.interpreter.symbols)
            late.add(name)
            if values[name] is None:
                undefined.add(name)
        if all(each is None for each in grads):
            return (None,) * (4 + ctx.count)
        metas = {each["name"]: each["meta"] for each in [*graph["inputs"], *graph["nodes"]]}
        for node in ctx.parts.backward:
            _step(node, values, undefined, late, metas, ctx)
        found = [
            None if each is None or each in undefined else argument(each, values, ctx.interpreter.symbols)
            for each in ctx.parts.gradients
        ]
        return (None, None, None, None, *found)


def own_tangent(own: Functional, tangent: dict[str, Any], grad: Any, symbols: dict[str, int]) -> Any:
    """Return an incoming gradient as the graph takes it."""
    if grad is None and own.rules("gradient.undefined"):
        return None
    wanted = dtype(tangent["meta"]["dtype"])
    if grad is None:
        return torch.zeros([size(each, symbols) for each in tangent["meta"]["shape"]], dtype=wanted)
    if own.rules("gradient.dtype"):
        grad = grad.to(wanted)
    if tangent.get("memory_format") is not None:
        return grad.contiguous(memory_format=getattr(torch, tangent["memory_format"]))
    stride = tuple(size(each, symbols) for each in tangent["stride"])
    return grad if grad.stride() == stride else torch.empty_strided(grad.shape, stride, dtype=grad.dtype).copy_(grad)


def _step(
    node: dict[str, Any], values: dict[str, Any], undefined: set[str], late: set[str], metas: dict[str, Any], ctx: Any
) -> None:
    """Run a node of the backward; undefined tangents are no zeros (section 10)."""
    used = {n for each in [*node.get("args", []), *node.get("kwargs", {}).values()] for n in references(each)}
    name, missing = node["name"], used & undefined
    if used & late:
        late.add(name)
    if missing and not (used & late) - undefined:
        undefined.add(name)
        return
    filled = dict(values)
    if missing:
        symbols, args, meta = ctx.interpreter.symbols, node.get("args", []), node["meta"]
        if node["op"] == "aten::add.Tensor" and len(args) == 2 and not node.get("kwargs"):
            other = next(iter(used - undefined))
            shape = tuple(size(each, symbols) for each in meta["shape"])
            if tuple(values[other].shape) == shape and values[other].dtype == dtype(meta["dtype"]):
                values[name] = values[other]
                return
        for each in missing:
            shape = [size(step, symbols) for step in metas[each]["shape"]]
            filled[each] = torch.zeros(shape, dtype=dtype(metas[each]["dtype"]))
    values[name] = ctx.interpreter.call(node, filled)
