"""Graphs that change what was checked before a kernel trusts it; each runs in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.hostile.crafted import Crafted, schema_of

FORKS = """
import json, os, sys, torch
import aotexport_runtime
for path in sys.argv[1:]:
    end, begin = os.pipe()
    child = os.fork()
    if not child:
        said = "ran"
        try:
            module = aotexport_runtime.load(path, target="autograd")
            module(torch.linspace(-1, 1, 20).reshape(5, 4))["best"].sum().backward()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(begin, said.encode())
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(os.read(end, 10000).decode() if status == 0 else f"ended with {status}"))
"""

LARGE = 1 << 40


class Nodes:
    """Appends nodes to the forward graph of a crafted bundle; each is called for its metadata."""

    def __init__(self, crafted: Crafted) -> None:
        self._crafted = crafted
        self._count = 0
        self._names = dict[int, str]()
        self._held = list[torch.Tensor]()
        self.weight = self._named("parameter:linear.weight", torch.ones(3, 4))
        self.x = self._named("input:x", torch.ones(5, 4))

    def _named(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._held.append(tensor)
        self._names[id(tensor)] = name
        return tensor

    def call(self, op: str, *args: Any, gives: Any = None) -> Any:
        """Append a call of an operator; `gives` is like its result, where it cannot be called here."""
        base, _, overload = op.partition(".")
        with torch.no_grad():
            result = getattr(getattr(torch.ops.aten, base), overload)(*args) if gives is None else gives
        self._count += 1
        name = f"crafted_{self._count}"
        self._crafted.node("forward", name=name, op=f"aten::{op}", args=self._argument([*args]), meta=_meta(result))
        if not isinstance(result, list | tuple):
            return None if result is None else self._named(name, result.view_as(result))
        items = [self._named(f"{name}_{place}", item.view_as(item)) for place, item in enumerate(result)]
        for place, item in enumerate(items):
            fields = {"op": "python::getitem", "args": [name, place], "meta": _meta(item)}
            self._crafted.node("forward", name=f"{name}_{place}", **fields)
        return items

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return {"kind": "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Tensor):
            return self._names[id(value)]
        return [*map(self._argument, value)] if isinstance(value, list) else value

    def without_writes(self) -> None:
        """Let the graph have no operator that says that it writes."""
        self._crafted.put("forward", "nodes/0/op", "aten::add.Tensor")
        self._crafted.put("forward", "schemas/aten::add.Tensor", schema_of("aten::add.Tensor"))

    def returned(self, tensor: torch.Tensor) -> None:
        """Let the module return a sum that a tensor is part of."""
        tensor = self.call("mul.Tensor", tensor, tensor)  # its gradient has memory of its own
        best = self.call("add.Tensor", self._named("getitem", torch.ones(5)), self.call("sum.default", tensor))
        self._crafted.put("forward", "outputs/0", self._names[id(best)])


def _meta(value: Any) -> Any:
    if isinstance(value, list | tuple) and value:
        return {"kind": "sequence", "items": [*map(_meta, value)]}
    if value is None or value == ():
        return {"kind": "nothing"}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"kind": "tensor", "dtype": dtype, "shape": [*value.shape], "stride": [*value.stride()]}


def written_by_batch_norm(n: Nodes) -> None:
    n.without_writes()
    image = n.call("to.dtype", n.call("view.default", n.weight, [1, 3, 2, 2]), torch.float64)
    pooled, indices = n.call("max_pool2d_with_indices.default", image, [2, 2], [2, 2])
    floats = n.call("view.dtype", n.call("view.default", indices, [3]), torch.float64)
    least = n.call("view.dtype", n.call("full.default", [2, 3, 1], LARGE), torch.float64)
    n.call("native_batch_norm.default", least, None, None, floats, n.call("clone.default", floats), True, 1.0, 1e-5)
    last = [[2, 2], [2, 2], [0, 0], [1, 1], False, indices]
    n.returned(n.call("max_pool2d_with_indices_backward.default", pooled, image, *last, gives=image))


def pooling(axes: int, alias: Callable[[Nodes, torch.Tensor], torch.Tensor]) -> Callable[[Nodes], None]:
    def make(n: Nodes) -> None:
        image = n.call("view.default", n.weight, [1, 3, *[1] * (axes - 2), 2, 2])
        size = [*[1] * (axes - 2), 2, 2]
        pooled, indices = n.call(f"max_pool{axes}d_with_indices.default", image, size)
        n.call("fill_.Scalar", alias(n, indices), LARGE)
        n.returned(pooled)

    return make


def unsafe_view(n: Nodes, indices: torch.Tensor) -> torch.Tensor:
    return n.call("_unsafe_view.default", indices, [3])


def taken_storage(n: Nodes, indices: torch.Tensor) -> torch.Tensor:
    return n.call("set_.source_Tensor", n.call("full.default", [1], 0), indices, gives=torch.zeros(1).long())


def given_data(n: Nodes, indices: torch.Tensor) -> torch.Tensor:
    other = n.call("clone.default", indices)
    n.call("set_data.default", other, indices)
    return other


def adaptive(n: Nodes) -> None:
    image = n.call("view.default", n.weight, [1, 3, 2, 2])
    pooled, indices = n.call("adaptive_max_pool2d.default", image, [1, 1])
    n.call("fill_.Scalar", unsafe_view(n, indices), LARGE)
    n.returned(pooled)


def targets(n: Nodes) -> None:
    logs, classes = n.call("view.default", n.weight, [3, 1, 4]), n.call("full.default", [1, 1], 1)
    loss, _ = n.call("_ctc_loss.default", logs, classes, [3], [1])
    n.call("fill_.Scalar", n.call("_unsafe_view.default", classes, [1]), LARGE)
    n.returned(loss)


def sizes_of_a_saved_tensor(n: Nodes) -> None:
    row, images = n.call("select.int", n.weight, 0, 0), n.call("clone.default", n.x)
    normed = n.call("native_batch_norm.default", images, row, None, None, None, True, 0.1, 1e-5)[0]
    n.call("set_data.default", images, n.call("full.default", [5, 1 << 22], 1.0))
    n.returned(normed)


REFUSED = "CheckFailed: operator `aten::{}`: {}"
CASES: dict[str, tuple[Callable[[Nodes], None], str]] = {
    "batch norm": (
        written_by_batch_norm,
        REFUSED.format("max_pool2d_with_indices_backward.default", "`indices` must be from 0 to below 4"),
    ),
    "unsafe_view": (pooling(2, unsafe_view), "ran"),
    "set_": (pooling(2, taken_storage), "ran"),
    "set_data": (pooling(2, given_data), "ran"),
    "adaptive": (adaptive, "ran"),
    "targets": (targets, "ran"),
    "sizes": (sizes_of_a_saved_tensor, "RuntimeError: one of the variables needed for gradient computation"),
}


def test_graphs_that_change_what_was_checked_stay_within_their_memory(tiny, tmp_path):
    paths = []
    for name, (make, _) in CASES.items():
        crafted = Crafted(tiny, tmp_path / name)
        make(Nodes(crafted))
        paths.append(crafted.seal())
    done = subprocess.run([sys.executable, "-c", FORKS, *paths], stdout=subprocess.PIPE, text=True, check=True)
    said = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {name: text for name, text in said.items() if not text.startswith(CASES[name][1])} == {}
