"""Drafts of forward graphs from text, as `draft_text` prints them."""

import ast
import importlib
import re
import textwrap
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (  # noqa: TID251 (graphs that no tracer makes)
    ShapeEnv,
    compute_unbacked_bindings,
)

from aotexport.capture.passes.contract import Draft
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.capture.trace.forward_capture import Binding
from aotexport.model.state import StateEntry
from aotexport.torch_internals.calls import FakeTensor, FakeTensorMode
from aotexport.torch_internals.names import OpOverload

_PLACEHOLDER = re.compile(r"%(\w+) : (\w+)\[(.*?)\]( requires_grad)? = (?:state (\S+?))?(?: and )?(?:argument (\d+))?")
_TAKEN = re.compile(r"%(\w+) : (\w+)\[(.*)\]")
_ATTRIBUTE = re.compile(r"%(\w+)(?: : (\w+)\[(.*)\])? = attribute (\w+)")
_CALL = re.compile(r"%(\w+)(?: : [^=]*)? = (\S+?)\((.*)\)((?: #\w+)*)")


def parse_draft(text: str, *, grad: bool = False) -> Draft:
    """Return the draft that a text describes; types of what calls give are computed, not read.

    Args:
        text: lines as `draft_text` prints them.
        grad: whether the program records gradients.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    lines = textwrap.dedent(text).strip().splitlines()
    reads = lines.pop(0).split()[1:] if lines[0].startswith("reads ") else []
    bindings, inputs, rest = list[Binding](), list[FakeTensor](), list[str]()
    reader = _Reader(mode)
    for line in lines:
        match = _PLACEHOLDER.fullmatch(line)
        if match is None:
            rest.append(line)
            continue
        name, dtype, sizes, requires_grad, entry, argument = match.groups()
        tensor = _tensor(dtype, sizes).requires_grad_(bool(requires_grad))
        state = entry and StateEntry(tensor, [entry], "parameter" if requires_grad else "buffer")
        bindings.append(Binding(entry=state or None, argument=None if argument is None else int(argument)))
        inputs.append(mode.from_tensor(tensor, static_shapes=True))
        reader.placeholder(name, inputs[-1])
    return Draft(
        graph=reader.read(rest),
        bindings=tuple(bindings),
        inputs=tuple(inputs),
        state=tuple(binding.entry for binding in bindings if binding.entry is not None),
        fakes=FakeInputs(mode, [], [], None),
        grad=grad,
        reads=frozenset(reads),  # type: ignore[arg-type]
    )


class _Reader:
    """Makes the module of one graph."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.module = torch.fx.GraphModule({}, torch.fx.Graph())
        self.nodes: dict[str, torch.fx.Node] = {}

    def placeholder(self, name: str, value: Any) -> None:
        self._node("placeholder", name, name, value=value)

    def read(self, lines: list[str]) -> torch.fx.GraphModule:
        while lines:
            line = lines.pop(0)
            if line.startswith("return"):
                self.module.graph.output(self._values(line.removeprefix("return"))[0])
            elif match := _TAKEN.fullmatch(line):
                with self.mode:
                    self.placeholder(match[1], _tensor(match[2], match[3]))
            elif match := _ATTRIBUTE.fullmatch(line):
                count = next((i for i, each in enumerate(lines) if not each.startswith("    ")), len(lines))
                body, lines = [each.removeprefix("    ") for each in lines[:count]], lines[count:]
                self._attribute(*match.groups(), body)
            else:
                self._call(line)
        self.module.recompile()
        return self.module

    def _attribute(self, name: str, dtype: str | None, sizes: str, target: str, body: list[str]) -> None:
        if not hasattr(self.module, target):
            setattr(self.module, target, _Reader(self.mode).read(body) if body else _tensor(str(dtype), sizes))
        value = None if dtype is None else self.mode.from_tensor(getattr(self.module, target), static_shapes=True)
        self._node("get_attr", name, target, value=value)

    def _call(self, line: str) -> None:
        match = _CALL.fullmatch(line)
        assert match is not None, f"cannot read `{line}`"
        name, target, arguments, marks = match.groups()
        args, kwargs = self._values(arguments)
        node = self._node("call_function", name, _function(target), tuple(args), kwargs)
        if marks:
            node.meta["custom"] = dict.fromkeys(marks.replace("#", "").split(), True)
        node.meta["val"] = self._result(node)

    def _result(self, node: torch.fx.Node) -> Any:
        """Return what a call gives of fakes; None: it is no operator, or one with bodies."""
        if not isinstance(node.target, OpOverload) and node.target.__module__ != "_operator":  # type: ignore[union-attr]
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with self.mode:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        if symbols := compute_unbacked_bindings(self.mode.shape_env, result):
            node.meta["unbacked_bindings"] = symbols
        return result

    def _node(self, op: str, name: str, target: Any, args: Any = (), kwargs: Any = None, *, value: Any = None) -> Any:
        node = self.nodes[name] = self.module.graph.create_node(op, target, args, kwargs, name)
        assert node.name == name, f"`{name}` cannot be a name here, `{node.name}` can"
        node.meta["val"] = value
        return node

    def _values(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        call = ast.parse(re.sub(r"%(\w+)", r"node.\1", f"f({text})"), mode="eval").body
        assert isinstance(call, ast.Call)
        return [*map(self._value, call.args)], {str(each.arg): self._value(each.value) for each in call.keywords}

    def _value(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.List):
            return [*map(self._value, tree.elts)]
        if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name):
            return self.nodes[tree.attr] if tree.value.id == "node" else getattr(torch, tree.attr)
        return ast.literal_eval(tree)


def _tensor(dtype: str, sizes: str) -> torch.Tensor:
    return torch.zeros([int(size) for size in sizes.split(",") if size], dtype=getattr(torch, dtype))


def _function(name: str) -> Any:
    *path, last = name.split(".")
    if path[0] in ("aten", "higher_order"):
        found: Any = torch.ops
        for part in (*path, last):
            found = getattr(found, part)
        return found
    return getattr(importlib.import_module(".".join(path)), last)
