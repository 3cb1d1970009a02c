"""Sections 8 and 11: a call, and a recorded call replayed and compared."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.reader.bundle import Bundle
from tests.reader.functional import Functional
from tests.reader.guards import check
from tests.reader.interpret import Interpreter, Unread, compare_outputs
from tests.reader.trees import Flattening, build, change, key_of, must
from tests.reader.values import dtype

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}

_WORD = 2**64 - 1


class Replay:
    """One recorded call of a bundle, run by one of the two graphs."""

    def __init__(self, root: Path, entry: dict[str, Any], form: str) -> None:
        """Prepare `entry`, a `VectorEntry`; `form` is `forward` or `functional`."""
        self.bundle = Bundle(root)
        self.form = form
        folder = f"programs/{entry['program']}"
        self.program = self.bundle.json(f"{folder}/program.json")
        self.forward = self.bundle.graph(f"{folder}/{self.program['forward']['file']}")
        record = self.program.get("functional")
        graph = None if record is None else self.bundle.graph(f"{folder}/{record['file']}")
        self.functional = None if graph is None else Functional(self.program, graph)
        compare_outputs(self.forward, self.forward["outputs"], self.program["outputs"])
        if graph is not None:
            compare_outputs(graph, graph["outputs"][len(record.get("mutations", [])) :], self.program["outputs"])
        self.vector = self.bundle.json(entry["record"])
        self.stored = self.bundle.tensors(entry["tensors"])
        if any("subclass" in each for each in self.program["inputs"]):
            raise Unread("tensor subclasses: their classes are the caller's")
        self.module = self.bundle.state()
        for each in self.bundle.manifest.get("state", []):
            self.module.update(dict.fromkeys(each.get("tied", []), self.module[each["name"]]))
        self.facts: dict[str, str] = {}
        self.values: dict[str, torch.Tensor] = {}

    # --- section 8 ----------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The module's tensors by first names."""
        return {each["name"]: self.module[each["name"]] for each in self.bundle.manifest.get("state", [])}

    def named(self, arguments: list[Any]) -> dict[str, Any]:
        """Return what a call passes, but what it may leave out; tensors and integers are in the order of the inputs."""
        rest = iter(arguments)
        specs = self.program["inputs"]
        inputs = [self.module[spec["name"]] if spec["kind"] == "state" else next(rest) for spec in specs]
        passed = [each for each in self.program["parameters"] if not each.get("optional", False)]
        return {each["name"]: build(each["tree"], inputs.__getitem__) for each in passed}

    def call(self, named: dict[str, Any]) -> Any:
        """Return the result of a call, for values by the names of parameters; `outputs` is then `Program.outputs`."""
        parameters = {each["name"]: each for each in self.program["parameters"]}
        must(set(named) <= set(parameters), "an argument that no parameter takes")
        passed = Flattening()
        for name, parameter in parameters.items():
            must(name in named or parameter.get("optional", False), f"{name} is missing")
            if name in named:
                passed.add(parameter["tree"], named[name], name)
        changes = [(passed.containers[each["path"]], each) for each in self.program.get("container_changes", [])]
        for container, _ in changes:
            must(sum(each is container for each in passed.containers.values()) == 1, "a container in two places")
        inputs = self._fetched(passed)
        symbols = check(self.program, inputs)
        outputs = self.outputs = self._run(inputs, symbols)
        for each in self.program.get("rebinds", []):
            for name in self._names(each["name"]):
                self.module[name] = outputs[each["output_index"]]
        for container, record in changes:
            change(container, record, outputs.__getitem__)
        return build(self.program["output_tree"], outputs.__getitem__)

    def _names(self, name: str) -> list[str]:
        """Return the names of a state tensor."""
        entry = next(each for each in self.bundle.manifest["state"] if each["name"] == name)
        return [name, *entry.get("tied", [])]

    def _fetched(self, passed: Flattening) -> list[Any]:
        """Return the inputs of the graphs (8.5)."""
        inputs: list[Any] = []
        for index, spec in enumerate(self.program["inputs"]):
            if spec["kind"] == "state":
                tensor = self.module[spec["name"]]
                same = all(self.module[name] is tensor for name in self._names(spec["name"]))
                must(same, f"{spec['name']}: no longer tied")
                must(passed.values.get(index, tensor) is tensor, f"{spec['name']}: not the module's own")
                inputs.append(tensor)
                continue
            value = passed.values[index]
            inputs.append(torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value)
        return inputs

    def _run(self, inputs: list[Any], symbols: dict[str, int]) -> list[Any]:
        mode = torch.is_grad_enabled()
        try:
            if self.form == "functional":
                if self.functional is None:
                    raise Unread("no functional graph")
                if not self.functional.serves(inputs, symbols):
                    raise Unread("a soft guard of the functional graph")
                return self.functional.run(inputs, symbols)
            requires = any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
            is_recorded = requires and torch.is_grad_enabled()
            if not self.program["forward"].get("differentiable", True) and is_recorded:
                raise Unread("the forward graph lacks the backward of a function")
            return Interpreter(self.forward, symbols).run(inputs)
        except BaseException:
            torch.set_grad_enabled(mode)
            raise

    # --- section 11 ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make all calls, and note what they show."""
        vector = self.vector
        torch.manual_seed(vector["seed"])
        before = {name: (t, t._version, t.data_ptr()) for name, t in self.state.items()}
        names = [each["path"] for each in vector["inputs"]]
        for number in range(vector["calls"]):
            where = f"call {number}: "
            arguments, leaves = self.arguments()
            with torch.set_grad_enabled(vector["backward"]), self._autocast():
                self.call(self.named(arguments))
            noted = list(self._leaves(self.outputs))
            self._note_outputs(where, noted, dict(zip(names, arguments, strict=True)))
            if vector["backward"]:
                self._backward([value for _, value in noted])
            for name, value, leaf in zip(names, arguments, leaves, strict=True):
                if isinstance(value, torch.Tensor):
                    self._note(f"{where}{name} afterwards", value)
                    self.facts[f"{where}{name} afterwards requires_grad"] = str(value.requires_grad)
                if leaf is not None and vector["backward"]:
                    self._note(f"{where}gradient of {name}", leaf.grad)
            self._note_state(where, before)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        name = self.program.get("autocast")
        if name is None:
            yield
            return
        with torch.autocast("cpu", dtype=getattr(torch, name)):
            yield

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """Return fresh arguments, and the leaf that the gradient of each comes to."""
        spans: dict[str, torch.Tensor] = {}
        roots: dict[str, torch.Tensor] = {}
        specs = self.vector["inputs"]
        for spec in specs:
            if spec.get("key") and spec["key"] not in spans:
                span = self._made(spec) if spec.get("quantiles") else self.stored[spec["key"]].clone()
                spans[spec["key"]] = torch.view_as_complex(span) if spec.get("is_complex") else span
        for spec in specs:
            key = spec.get("key", "")
            part = [each.get("key") for each in specs].count(key) > 1 or not key
            part = part or math.prod(spec.get("shape", [])) != spans[key].numel()
            if key and part and spec.get("requires_grad") and not spec.get("is_leaf", True) and key not in roots:
                roots[key] = spans[key].requires_grad_(True)
                with torch.enable_grad():
                    spans[key] = roots[key].clone()
        values: list[Any] = []
        leaves: list[Any] = []
        for spec in specs:
            value, leaf = self._argument(spec, spans, roots)
            values.append(value)
            leaves.append(leaf)
        return values, leaves

    def _made(self, spec: dict[str, Any]) -> torch.Tensor:
        """Return the span of an argument by 11.11."""
        place = next(i for i, each in enumerate(self.vector["inputs"]) if each is spec)
        taken = [each for each in self.program["inputs"] if each["kind"] != "state"]
        name = taken[place]["meta"]["dtype"]
        offset, shape, stride = spec.get("offset", 0), spec.get("shape", []), spec.get("stride", [])
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        count = 0 if 0 in shape else last + 1
        made = torch.empty(count, dtype=torch.float64)
        quantiles = spec["quantiles"]
        for element in range(count):
            z = ((place << 40) + element + 1) * 0x9E3779B97F4A7C15 + self.vector["seed"] & _WORD
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
            p = ((z ^ z >> 31) >> 11) / 2**53 * (len(quantiles) - 1)
            k = int(p)
            made[element] = quantiles[k] + (p - k) * (quantiles[k + 1] - quantiles[k])
        return made if name == "float64" else made.to(torch.float32).to(dtype(name))

    def _argument(self, spec: dict[str, Any], spans: dict[str, Any], roots: dict[str, Any]) -> tuple[Any, Any]:
        if spec.get("value") is not None:
            return spec["value"], None
        span, shape, stride = spans[spec["key"]], spec.get("shape", []), spec.get("stride", [])
        grad, is_leaf = spec.get("requires_grad", False), spec.get("is_leaf", True)
        with torch.enable_grad():
            if grad and not is_leaf and spec["key"] in roots:
                return span.as_strided(shape, stride, spec.get("offset", 0)), roots[spec["key"]]
            leaf = torch.empty(0, dtype=span.dtype).set_(span.untyped_storage(), spec.get("offset", 0), shape, stride)
            leaf.requires_grad_(grad)
            return leaf if is_leaf or not grad else leaf.clone(), leaf if grad else None

    def _leaves(self, outputs: list[Any]) -> Iterator[tuple[str, Any]]:
        tree = self.program["output_tree"]
        changes = self.program.get("container_changes", [])
        if not changes:
            yield from _walk(tree, "output", outputs)
            return
        yield from _walk(tree, "output[0]", outputs)
        for index, each in enumerate(changes):
            put = [item for item in each["items"] if item is not None]
            for place, item in enumerate(put):
                yield from _walk(item, f"output[{index + 1}][{place}]", outputs)

    def _note_outputs(self, where: str, noted: list[tuple[str, Any]], arguments: dict[str, Any]) -> None:
        self.facts[f"{where}outputs"] = ", ".join(path for path, _ in noted)
        known = [(name, t) for name, t in {**arguments, **self.state}.items() if isinstance(t, torch.Tensor)]
        for path, value in noted:
            name = f"{where}{path}"
            if not isinstance(value, torch.Tensor):
                self.facts[name] = repr(value)
                continue
            self._note(name, value)
            self.facts[f"{name} requires_grad"] = str(value.requires_grad)
            same = [other for other, tensor in known if tensor is value]
            shared = [other for other, tensor in known if _pointer(tensor) == _pointer(value) != 0]
            if same:
                self.facts[f"{name} is"] = same[0]
            if shared:
                self.facts[f"{name} shares memory with"] = ", ".join(shared)
            known.append((path, value))

    def _note_state(self, where: str, before: dict[str, Any]) -> None:
        for name, tensor in self.state.items():
            if tensor.requires_grad and tensor.is_leaf and self.vector["backward"]:
                self._note(f"{where}gradient of {name}", tensor.grad)
                if name in self.vector.get("dropped_gradients", []):
                    tensor.grad = None
            first, *marks = before[name]
            if not tensor.requires_grad or first is not tensor or marks != [tensor._version, tensor.data_ptr()]:
                self._note(f"{where}state {name}", tensor)

    def _note(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.facts[name] = "None"
            return
        if tensor.is_sparse:
            self.facts[f"{name} layout"] = str(tensor.layout).removeprefix("torch.")
            tensor = tensor.detach().to_dense()
        steps = [step for step, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1]
        self.facts[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {steps}"
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        self.values[name] = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.clone()

    def _backward(self, values: list[Any]) -> None:
        roots: list[torch.Tensor] = []
        for value in values:
            flows = isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None
            if flows and not any(value is root for root in roots):
                roots.append(value)
        numbers = [torch.arange(root.numel(), dtype=torch.float64) for root in roots]
        cotangents = [
            torch.cos(0.7 * n + 0.3).reshape(root.shape).to(root.dtype) for n, root in zip(numbers, roots, strict=True)
        ]
        if roots:
            torch.autograd.backward(roots, cotangents)

    def differences(self) -> list[str]:
        """Return what differs from what eager showed."""
        expected, names = dict(self.vector["facts"]), self.vector["values"]
        found = [n for n in {*expected, *self.facts} if expected.get(n) != self.facts.get(n)]
        for index, name in enumerate(names):
            if name.endswith((" norm", " norms")):
                continue
            wanted, got = self.stored[f"v{index}"], self.values.get(name)
            error = math.inf if got is None or got.shape != wanted.shape else _error(wanted, got)
            bound = TOLERANCES.get(wanted.dtype, 0.0)
            if autocast := self.program.get("autocast"):
                bound = max(bound, TOLERANCES[getattr(torch, autocast)])
            if not error <= max(bound, 2 * self.vector.get("eager_errors", {}).get(name, 0.0)):
                found.append(name)
        return sorted(found)


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    if wanted.dtype not in TOLERANCES:
        return 0.0 if torch.equal(wanted.view(torch.uint8), got.contiguous().view(torch.uint8)) else math.inf
    if not torch.equal(wanted.isfinite(), got.isfinite()):
        return math.inf
    a, b = wanted.double(), got.double()
    finite = a.isfinite()
    if not finite.any():
        return 0.0
    scale = a[finite].abs().max().item()
    return (a[finite] - b[finite]).abs().max().item() / (scale or 1.0)


def _walk(tree: dict[str, Any], path: str, outputs: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths (section 8)."""
    kind = tree["kind"]
    if kind == "leaf":
        value = outputs[tree["index"]]
        # A tensor that is made for an array is none of the others.
        yield path, torch.from_numpy(value.detach().numpy()) if tree.get("array") else value
    elif kind == "sequence":
        for index, item in enumerate(tree["items"]):
            yield from _walk(item, f"{path}[{index}]", outputs)
    elif kind == "mapping":
        for key, item in zip(tree["keys"], tree["items"], strict=True):
            yield from _walk(item, f"{path}[{key_of(key)!r}]", outputs)
    elif kind == "named_fields":
        for field, item in zip(tree["fields"], tree["items"], strict=True):
            yield from _walk(item, f"{path}.{field}", outputs)
