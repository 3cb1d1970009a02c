"""Golden calls: the arguments of one, and what is seen of it when eager, the runtime or another reader makes it.

`calls/README.md` says what a golden call is.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from tests.golden.places import described, found_at, leaves

HERE = Path(__file__).parent
CALLS: dict[str, dict[str, Any]] = json.loads((HERE / "calls/cases.json").read_text(encoding="utf-8"))
TOLERANCES = {"float64": 1e-7, "float32": 1e-4, "bfloat16": 4e-2, "complex64": 1e-4}


class Subject(Protocol):
    """What makes the calls."""

    def call(self, arguments: dict[str, Any], changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the result, and the values that were passed by the names of parameters.

        Args:
            arguments: tensors and integers by their paths; the example's are in the place of others.
            changes: of containers, by their paths; see `changed`.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state by first names."""
        ...

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor into the module."""
        ...


class Undefined(torch.autograd.Function):
    """A copy through which no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


class Arguments:
    """The tensors and integers that a golden call passes.

    Attributes:
        values: by path.
        leaves: by path, of those that require grad, the tensor that gradients come to.
    """

    def __init__(self, case: dict[str, Any], root: Path, state: dict[str, torch.Tensor]) -> None:
        """Make the arguments of `case` from the recorded call that it changes."""
        manifest = json.loads((root / "bundle.json").read_text(encoding="utf-8"))
        entry = next(each for each in manifest["testvectors"] if each["program"] == case["program"])
        self._stored = load_file(root / entry["tensors"])
        self._spans: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.seed = json.loads((root / entry["record"]).read_text(encoding="utf-8"))["seed"]
        said = case.get("arguments", {})
        for spec in json.loads((root / entry["record"]).read_text(encoding="utf-8"))["inputs"]:
            path = spec["path"]
            self.values[path] = self._argument(path, {**spec, **said.get(path, {})})
        for path, changes in said.items():
            if "is" in changes:
                self.values[path] = {**state, **self.values}[changes["is"]]
                self.leaves.pop(path, None)
            elif "copy" in changes:
                copied = {**state, **self.values}[changes["copy"]]
                self.values[path] = copied.detach().clone().requires_grad_(copied.requires_grad)
            elif path not in self.values:
                self.values[path] = complex(changes["complex"]) if "complex" in changes else changes["constant"]

    def _argument(self, path: str, spec: dict[str, Any]) -> Any:
        if "constant" in spec:
            return spec["constant"]
        if spec.get("value") is not None:
            return spec["value"]
        with torch.enable_grad(), torch.inference_mode(spec.get("inference", False)):
            strided = self._strided(spec)
            if spec.get("device") or spec.get("sparse"):
                return strided.to("meta") if spec.get("device") else strided.to_sparse()
            leaf = strided.requires_grad_(spec.get("requires_grad", False))
            value = leaf if spec.get("is_leaf", True) or not leaf.requires_grad else leaf.clone()
            value = value.conj() if spec.get("conj") else torch._neg_view(value) if spec.get("neg") else value
        if leaf.requires_grad:
            self.leaves[path] = leaf
        if spec.get("hook"):
            value.register_hook(lambda gradient: gradient)
        if spec.get("retain_grad"):
            value.retain_grad()
        return value

    def _strided(self, spec: dict[str, Any]) -> torch.Tensor:
        shape, offset = spec.get("shape", []), spec.get("offset", 0)
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        stride = spec["stride"] if "stride" in spec and len(spec["stride"]) == len(shape) else steps
        count = 0 if 0 in shape else offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        key = spec["key"]
        if key not in self._spans:
            stored = self._stored[key]
            span = torch.tensor(spec["values"], dtype=stored.dtype) if "values" in spec else stored
            self._spans[key] = torch.view_as_complex(span) if spec.get("is_complex") else span
        span = self._spans[key]
        if count > span.numel():
            span = self._spans[key] = span.repeat(math.ceil(count / span.numel()))
        if spec.get("dtype"):
            span = span.to(getattr(torch, spec["dtype"]))
        if "begins" in spec:
            span = torch.from_numpy(span.numpy()[spec["begins"] :])
        return torch.empty(0, dtype=span.dtype).set_(span.untyped_storage(), offset, shape, stride)


class Observer:
    """Makes the steps of a golden call and notes what it sees.

    Attributes:
        facts: texts, by name.
        values: elements of tensors, by name.
    """

    def __init__(self, case: dict[str, Any], root: Path, subject: Subject) -> None:
        """Make the call."""
        self.facts: dict[str, str] = {}
        self.values: dict[str, list[Any]] = {}
        self._case, self._subject = case, subject
        self._result: Any = None
        self._passed: dict[str, Any] = {}
        made = Arguments(case, root, subject.state())
        self._arguments, self._leaves = made.values, made.leaves
        self._outputs: dict[str, Any] = {}
        self._retained: list[str] = []
        self._visits: dict[str, int] = {}
        for path, value in self._tensors().items():
            if value.grad_fn is not None:
                self._visits[path] = 0
                value.grad_fn.register_hook(lambda *_, path=path: self._visit(path))
        torch.manual_seed(made.seed)
        for number, step in enumerate(case["steps"]):
            (kind,) = {"call", "backward", "change", "retain", "replace"} & set(step)
            getattr(self, f"_{kind}")(f"{number}: ", step[kind], {key: step[key] for key in step if key != kind})
            if kind == "call" and not self._outputs:
                break

    def _visit(self, path: str) -> None:
        self._visits[path] += 1

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {path: value for path, value in self._arguments.items() if isinstance(value, torch.Tensor)}

    def _find(self, path: str) -> torch.Tensor:
        return {**self._subject.state(), **self._arguments, **self._outputs}[path]

    @contextlib.contextmanager
    def _noting(self, where: str) -> Iterator[None]:
        """Note that what is done raises."""
        try:
            yield
        except Exception as error:
            self.facts[f"{where}raises"] = "yes"
            self.error = error

    # --- steps --------------------------------------------------------------------------------------------

    def _call(self, where: str, grad: bool, options: dict[str, Any]) -> None:
        known = {**self._tensors(), **self._subject.state()}
        versions = {name: tensor._version for name, tensor in known.items() if not tensor.is_inference()}
        mode = torch.is_grad_enabled()
        with contextlib.ExitStack() as stack:
            if "autocast" in options:
                stack.enter_context(torch.autocast("cpu", dtype=getattr(torch, options["autocast"])))
            if options.get("inference"):
                stack.enter_context(torch.inference_mode())
            torch.set_grad_enabled(grad)
            with self._noting(where):
                self._outputs.clear()
                if options.get("transform"):
                    torch.func.vmap(lambda _: self._made(), out_dims=None)(torch.zeros(1))
                else:
                    self._made()
            self.facts[f"{where}grad mode"] = str(torch.is_grad_enabled())
            self.facts[f"{where}autocast"] = str(torch.is_autocast_enabled("cpu"))
            torch.set_grad_enabled(mode)
        before = {id(tensor): name for name, tensor in known.items()}
        self._note_outputs(where, dict(known))
        if self._outputs:
            self.facts[f"{where}result"] = described(self._result, {})
        for path in self._case.get("seen", []) if self._outputs else []:
            self.facts[f"{where}{path} holds"] = described(found_at(self._passed, path), before)
        for name, version in versions.items():
            self.facts[f"{where}{name} version rises"] = str(known[name]._version - version)
        for path, value in self._tensors().items():
            if value.device.type == "cpu" and not value.is_sparse:
                self._note(f"{where}{path} afterwards", value)

    def _made(self) -> None:
        result, self._passed = self._subject.call(dict(self._arguments), self._case.get("containers", {}))
        self._result = result
        self._outputs.update((path, value) for path, value in leaves(result) if isinstance(value, torch.Tensor))

    def _note_outputs(self, where: str, known: dict[str, torch.Tensor]) -> None:
        for path, value in self._outputs.items():
            self._note(f"{where}{path}", value)
            self.facts[f"{where}{path} requires_grad"] = str(value.requires_grad)
            same = [name for name, tensor in known.items() if tensor is value]
            pointer = value.untyped_storage().data_ptr()
            shared = [name for name, t in known.items() if t.untyped_storage().data_ptr() == pointer != 0]
            self.facts[f"{where}{path} is"] = same[0] if same else ""
            self.facts[f"{where}{path} shares memory with"] = ", ".join(shared)
            known[path] = value

    def _backward(self, where: str, roots: list[str], options: dict[str, Any]) -> None:
        tensors: list[torch.Tensor] = []
        for path in roots or self._outputs:
            root = self._find(path)
            flows = isinstance(root, torch.Tensor) and root.requires_grad and root.grad_fn is not None
            if flows and not any(root is each for each in tensors):
                tensors.append(root)
        if options.get("undefined"):
            tensors = [Undefined.apply(each) for each in tensors]
        cotangents = [_cotangent(each, options.get("strides") == "reversed") for each in tensors]
        kept = bool(options.get("retain_graph"))
        with self._noting(where):
            if "of" not in options:
                torch.autograd.backward(tensors, cotangents, retain_graph=kept)
            else:
                self._gradients(where, tensors, cotangents, options)
        if "of" not in options and f"{where}raises" not in self.facts:
            known = {**self._leaves, **{path: self._find(path) for path in self._retained}}
            known |= {name: each for name, each in self._subject.state().items() if each.requires_grad}
            for path, tensor in known.items():
                self._note(f"{where}gradient of {path}", tensor.grad)
        for path, count in self._visits.items():
            self.facts[f"{where}visits of {path}"] = str(count)

    def _gradients(self, where: str, roots: list[Any], cotangents: list[Any], options: dict[str, Any]) -> None:
        inputs = [self._leaves.get(path, self._arguments[path]) for path in options["of"]]
        again = bool(options.get("again"))
        cotangents = [each.requires_grad_(again) for each in cotangents]
        found = torch.autograd.grad(
            roots, inputs, cotangents, retain_graph=again, create_graph=again, allow_unused=True
        )
        if again:
            which = [
                path for path, each in zip(options["of"], found, strict=True) if each is not None and each.requires_grad
            ]
            self.facts[f"{where}differentiable"] = ", ".join(which)
            sums = [each.sum() for each in found if each is not None and each.requires_grad]
            found = torch.autograd.grad(torch.stack(sums).sum(), inputs, allow_unused=True)
        for path, gradient in zip(options["of"], found, strict=True):
            self._note(f"{where}gradient of {path}", gradient)

    def _change(self, where: str, path: str, options: dict[str, Any]) -> None:
        with self._noting(where), torch.set_grad_enabled(options.get("recorded", False)):
            self._find(path).mul_(2)

    def _retain(self, where: str, paths: list[str], options: dict[str, Any]) -> None:
        self._retained += paths
        for path in paths:
            self._find(path).retain_grad()

    def _replace(self, where: str, name: str, options: dict[str, Any]) -> None:
        old = self._subject.state()[options.get("of", name)].detach()
        self._subject.put(name, torch.nn.Parameter(old * 2))

    # --- notes --------------------------------------------------------------------------------------------

    def _note(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.facts[name] = "None"
            return
        steps = [step for step, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1]
        self.facts[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {steps}"
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        self.values[name] = flat.tolist()

    def differences(self, case: dict[str, Any]) -> list[str]:
        """Return the names of what is otherwise than `case` says."""
        facts, values = case["facts"], case["values"]
        found = [name for name in {*facts, *self.facts} if facts.get(name) != self.facts.get(name)]
        for name in {*values, *self.values} - set(found):
            bound = TOLERANCES.get(facts[name].partition("[")[0], 0)
            wanted, got = values[name], self.values[name]
            scale = max([abs(each) for each in wanted], default=0) or 1
            if any(abs(a - b) > bound * scale for a, b in zip(wanted, got, strict=True)):
                found.append(name)
        return sorted(found)


def _cotangent(root: torch.Tensor, is_reversed: bool) -> torch.Tensor:
    number = torch.arange(root.numel(), dtype=torch.float64)
    found = torch.cos(0.7 * number + 0.3).reshape(root.shape).to(root.dtype)
    if not is_reversed:
        return found
    axes = list(range(found.ndim))[::-1]
    return found.permute(axes).contiguous().permute(axes)
