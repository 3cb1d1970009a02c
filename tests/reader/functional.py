"""Section 10: functional graphs, with autograd and the epilogues."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.reader.interpret import Interpreter
from tests.reader.joint import Joint, used_by
from tests.reader.values import argument, references, size, symbols_of


class Functional:
    """The functional graph of one program."""

    def __init__(self, program: dict[str, Any], graph: dict[str, Any]) -> None:
        """Prepare the graph of a program."""
        self.program, self.graph = program, graph
        self.record = program["functional"]
        self.mutations = self.record.get("mutations", [])
        self.outputs = self.record["outputs"]
        self.gradients = self.record.get("gradients")
        self._strides_anew = any(node["op"].startswith("aten::as_strided") for node in graph["nodes"])
        known = {each["symbol"] for each in program.get("dimensions", [])}
        shapes = [each["meta"]["shape"] for each in (self.gradients or {}).get("tangents", [])]
        self.is_sized_by_data = any(symbols_of(each) - known for shape in shapes for each in shape)
        self.returned = len(self.mutations) + len(self.outputs) + self.record.get("intermediate_bases", 0)

    def serves(self, inputs: Sequence[Any], symbols: dict[str, int]) -> bool:
        """Return whether the soft guards hold (10.3)."""
        specs = [spec for spec in self.program["inputs"] if spec["kind"] != "size"]
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        pairs = list(zip(specs, tensors, strict=True))
        read = [
            each["symbol"] for each in self.program.get("dimensions", []) if _is_tensor(inputs[each["input_index"]])
        ]
        conditions = (
            self._records(inputs),
            torch._C._functorch.peek_interpreter_stack() is None,  # noqa: TID251
            not torch.is_autocast_enabled("cpu"),
            all(size(each, symbols) for each in self.record.get("guards", [])),
            all(symbols[symbol] != 0 for symbol in read),
            all(_is_laid_out(tensor, spec["meta"]["stride"], symbols) for spec, tensor in pairs),
            not any(tensor.is_conj() for tensor in tensors),
            not any(tensor.is_neg() for tensor in tensors),
            self.gradients is None or not any(t.requires_grad and not _required_grad(spec) for spec, t in pairs),
            not any(inputs[index]._backward_hooks for index in self._reached_in_part()),
            not self._strides_anew or all(self._begins_alike(spec, tensor, symbols) for spec, tensor in pairs),
            all(self._changes_a_leaf_alike(each, inputs) for each in self.mutations),
            not any(self._is_shared(each["input_index"], inputs) for each in self.mutations),
            all(self._may_move(each, inputs, symbols) for each in self.mutations),
        )
        return all(conditions)

    def _records(self, inputs: Sequence[Any]) -> bool:
        detached = [] if self.gradients is None else self.gradients.get("detached_inputs", [])
        flows = any(_requires_grad(each) for index, each in enumerate(inputs) if index not in detached)
        if self.gradients is None:
            return not (torch.is_grad_enabled() and flows)
        return self.program["grad"] and torch.is_grad_enabled() and flows

    def _reached_in_part(self) -> list[int]:
        """Return the inputs whose gradients depend on some of the tangents and not on all."""
        if self.gradients is None:
            return []
        tangents = {each["name"] for each in self.graph["inputs"][len(self.program["inputs"]) :]}
        behind: dict[str, set[str]] = {name: {name} for name in tangents}
        for node in self.graph["nodes"]:
            behind[node["name"]] = set().union(*(behind.get(name, set()) for name in used_by([node], [])))
        found = enumerate(self.gradients["of_inputs"])
        names = {index: used_by([], [self.graph["outputs"][place]]) for index, place in found if place is not None}
        reached = {index: set().union(*(behind.get(each, set()) for each in used)) for index, used in names.items()}
        return [index for index, some in reached.items() if some and some != tangents]

    def _begins_alike(self, spec: dict[str, Any], tensor: torch.Tensor, symbols: dict[str, int]) -> bool:
        return tensor.storage_offset() == size(spec["meta"].get("offset", 0), symbols)

    def _changes_a_leaf_alike(self, mutation: dict[str, Any], inputs: Sequence[Any]) -> bool:
        is_leaf = inputs[mutation["input_index"]].is_leaf
        return self.gradients is None or is_leaf == mutation.get("is_leaf", True)

    def _is_shared(self, index: int, inputs: Sequence[Any]) -> bool:
        storage = inputs[index].untyped_storage()
        others = [each.untyped_storage() for i, each in enumerate(inputs) if i != index and _is_tensor(each)]
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return any(begin < each.data_ptr() + each.nbytes() and each.data_ptr() < end for each in others)

    def _may_move(self, mutation: dict[str, Any], inputs: Sequence[Any], symbols: dict[str, int]) -> bool:
        index = mutation["input_index"]
        bases = [o["input_index"] for o in self.outputs if o["kind"] == "input_alias" and o.get("steps") is None]
        moved = mutation.get("data") and (mutation.get("metadata") or index in bases)
        return not moved or self._begins_alike(self.program["inputs"][index], inputs[index], symbols)

    def run(self, inputs: Sequence[Any], symbols: dict[str, int]) -> list[Any]:
        """Return `Program.outputs` after the epilogues."""
        interpreter = Interpreter(self.graph, symbols)
        found = interpreter.run(inputs) if self.gradients is None else self._joint(inputs, interpreter)
        rises = {each["input_index"]: each["by"] for each in self.record.get("version_rises", [])}
        for mutation, new in zip(self.mutations, found, strict=False):
            index = mutation["input_index"]
            own = sum(mutation.get(kind, False) for kind in ("data", "metadata", "storage"))
            by = rises.pop(index, own)
            self._change(mutation, inputs[index], new, quiet=by < own)
            rises[index] = by - own + (by < own)
        for index, by in rises.items():
            for _ in range(by):
                torch.autograd.graph.increment_version(inputs[index])
        results = self._outputs(inputs, found)
        if self.gradients is not None:
            self._remember(inputs, results, found)
        mode = self.record.get("grad_mode")
        if mode is not None:
            torch.set_grad_enabled(mode)
        return results

    # --- a joint graph as one operation of autograd -------------------------------------------------------

    def _joint(self, inputs: Sequence[Any], interpreter: Interpreter) -> list[Any]:
        detached = self.gradients.get("detached_inputs", [])
        passed = [each.detach() if index in detached else each for index, each in enumerate(inputs)]
        positions = [self._position(tangent) for tangent in self.gradients["tangents"]]
        box: dict[str, Any] = {}
        differentiable = Joint.apply(self, interpreter, positions, box, *passed)
        found = list(box["values"])
        for position, value in zip(box["places"], differentiable, strict=True):
            found[position] = value
        return found

    def _position(self, tangent: dict[str, Any]) -> int:
        before = {"mutation": 0, "output": len(self.mutations), "intermediate_base": len(self.mutations + self.outputs)}
        return before[tangent["of"]] + tangent["index"]

    # --- epilogues ----------------------------------------------------------------------------------------

    def _change(self, mutation: dict[str, Any], tensor: torch.Tensor, new: torch.Tensor, *, quiet: bool) -> None:
        hidden = mutation.get("under_no_grad", False)
        if mutation.get("storage"):
            if quiet:
                tensor.data = new
                return
            with torch.no_grad():
                tensor.set_(new)
            return
        if mutation.get("metadata"):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not hidden):
                tensor.as_strided_(new.size(), new.stride(), new.storage_offset())
        if not mutation.get("data"):
            return
        if quiet:
            tensor.data.copy_(new)
        elif hidden or (mutation.get("is_leaf", True) and tensor.requires_grad):
            with torch.no_grad():
                tensor.copy_(new)
        else:
            tensor.copy_(new)

    def _remember(self, inputs: Sequence[Any], results: Sequence[Any], found: Sequence[Any]) -> None:
        """Note the versions that the backward compares (10.20)."""
        node = next((each.grad_fn for each in found if isinstance(each, torch.Tensor) and each.grad_fn), None)
        if node is None:
            return
        tensors = {"input": inputs, "output": [_detached(each) for each in results]}
        checks = [
            each for each in self.gradients.get("checks", []) if node.whole or self._name(each) in node.parts.saved
        ]
        node.versions = [
            (tensors[each["of"]][each["index"]], tensors[each["of"]][each["index"]]._version, each["tangents"])
            for each in checks
        ]

    def _name(self, check: dict[str, Any]) -> Any:
        if check["of"] == "input":
            return self.graph["inputs"][check["index"]]["name"]
        return self.graph["outputs"][len(self.mutations) + check["index"]]

    def _outputs(self, inputs: Sequence[Any], found: list[Any]) -> list[Any]:
        through = self._through()
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
            if each["kind"].endswith("alias") and each.get("requires_grad")
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
            return inputs[spec["input_index"]]
        if kind == "fresh":
            if spec.get("requires_grad") and self.gradients is not None and not self._has_tangent("output", index):
                return value.detach().requires_grad_(True)
            return value
        if kind == "input_alias":
            base, required = inputs[spec["input_index"]], _required_grad(self.program["inputs"][spec["input_index"]])
        elif kind == "intermediate_alias":
            base = found[len(self.mutations) + len(self.outputs) + spec["base_index"]]
            required = self._has_tangent("intermediate_base", spec["base_index"])
        else:
            base = found[len(self.mutations) + spec["output_index"]]
            required = self.outputs[spec["output_index"]].get("requires_grad", False)
        return self._alias(spec, base, value, required)

    def _has_tangent(self, of: str, index: int) -> bool:
        tangents = [] if self.gradients is None else self.gradients["tangents"]
        return (of, index) in [(each["of"], each["index"]) for each in tangents]

    def _alias(self, spec: dict[str, Any], base: torch.Tensor, value: torch.Tensor, required: bool) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.get("under_no_grad", False)):
            made = base
            for step in spec.get("steps") or ():
                namespace, _, name = step["op"].partition("::")
                operator, _, overload = name.partition(".")
                args = [argument(each, {}, {}) for each in step.get("args", [])]
                made = getattr(getattr(getattr(torch.ops, namespace), operator), overload)(made, *args)
            if spec.get("steps") is None or made.shape != value.shape:
                made = _in_dtype(base, value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())
        wants = spec.get("requires_grad", False)
        if wants == required:
            return made
        return made.requires_grad_() if wants else made.detach()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _required_grad(spec: dict[str, Any]) -> bool:
    return spec["meta"].get("requires_grad", False)


def _is_laid_out(tensor: torch.Tensor, strides: Sequence[Any], symbols: dict[str, int]) -> bool:
    steps = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return all(step == size(said, symbols) for step, said, count in steps if count > 1)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _in_dtype(base: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    if base.dtype == wanted:
        return base
    if base.is_complex() and not wanted.is_complex:
        return torch.view_as_real(base)
    return torch.view_as_complex(base) if wanted.is_complex and not base.is_complex() else base.view(wanted)
