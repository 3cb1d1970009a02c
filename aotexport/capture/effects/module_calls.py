"""Calls of submodules in a trace: beginning, end, arguments and results of each.

A clock ticks at every beginning and every end, and stamps the traced nodes. So a call without nodes of its own has a
place too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.structure import tree_of
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.tracing import node_annotations, traced_value, traces_subgraph
from aotexport_runtime.errors import first_line
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.trees import Tree

CLOCK = "clock"
"""Annotation of traced nodes: the time at which they were traced."""


@dataclass
class TracedCall:
    """A call of the submodule at `path`.

    Attributes:
        path: of the submodule.
        begin: time of its first node, if it has one.
        end: time of the first node after it.
        arguments: structure of its positional and keyword arguments, a pair; leaves index `values`.
        result: structure of its result.
        values: nodes and symbolic sizes among arguments and results.
        refusal: why it cannot be a call of its own; None: it can.
    """

    path: str
    begin: int = 0
    end: int = 0
    arguments: Tree | None = None
    result: Tree | None = None
    values: list[Any] = field(default_factory=list[Any])
    refusal: str | None = None


@dataclass
class TracedCalls:
    """The calls of one trace, in the order in which they began."""

    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    _times: Iterator[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def recorded(self, module: nn.Module | None) -> Iterator[None]:
        """Record the calls of the submodules of `module`, and annotate traced nodes with path and time."""
        self.calls.clear()
        if module is None:
            yield
            return
        paths = {id(child): path for path, child in module.named_modules()}
        original, get_attribute = nn.Module._call_impl, nn.Module.__getattr__
        reached: set[str] = set()

        def reach(owner: nn.Module, name: str) -> Any:
            value = get_attribute(owner, name)
            if isinstance(value, nn.Module):
                children = value.children() if isinstance(value, nn.Sequential | nn.ModuleList | nn.ModuleDict) else ()
                reached.update(paths.get(id(each), "") for each in (value, *children))
            return value

        def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(child))
            if path is None:
                return original(child, *args, **kwargs)
            annotations = node_annotations()
            before = annotations.get("module")
            traced = TracedCall(path)
            if path:
                self.calls.append(traced)
                if traces_subgraph():
                    traced.refusal = "it is called in a subgraph of an operator"
                # A symbolic size becomes a node at its first use: before the call, or before its end.
                traced.arguments = _structure(traced, (args, kwargs), "an argument")
            traced.begin = self._tick()
            annotations["module"] = path
            try:
                result = original(child, *args, **kwargs)
                traced.result = _structure(traced, result, "a result")
            finally:
                node_annotations()["module"] = before
                traced.end = self._tick()
            return result

        with (
            patched(
                Patch(nn.Module, "_call_impl", call, "Record calls of submodules"),
                Patch(nn.Module, "__getattr__", reach, "Record submodules that are used otherwise than by calls"),
            ),
            _loaded_bundles_shown(module) as bundles,
        ):
            yield
        reached.update(f"{paths[id(child)]}.{path}".lstrip(".") for child, untold in bundles for path in untold)
        called = {call.path for call in self.calls}
        reason = "the model's code uses it otherwise than by calling it"
        self.calls[:0] = [TracedCall(path, refusal=reason) for path in sorted(reached - called - {""})]

    def _tick(self) -> int:
        node_annotations()[CLOCK] = time = next(self._times)
        return time


@contextlib.contextmanager
def _loaded_bundles_shown(module: nn.Module) -> Iterator[list[tuple[BundleModule, Iterable[str]]]]:
    """Let loaded bundles call the submodules they were exported with; yield the paths of others of each."""
    bundles = [child for child in module.modules() if isinstance(child, BundleModule)]
    with contextlib.ExitStack() as shown:
        yield [(child, shown.enter_context(child.submodules_called())) for child in bundles]


def _structure(call: TracedCall, value: Any, role: str) -> Tree | None:
    """Return the structure of `value`, adding its tensors and sizes to `call.values`; None: the call has a refusal."""
    known = {id(value): index for index, value in enumerate(call.values)}

    def leaf_index(value: Any, path: str) -> int | None:
        if type(value) is int:
            return None
        node = traced_value(value)
        if isinstance(node, torch.Tensor):
            raise ExportFailed(f"{role} is a tensor that is no value of the graph")
        if id(node) not in known:
            known[id(node)] = len(call.values)
            call.values.append(node)
        return known[id(node)]

    if call.refusal is None:
        try:
            return tree_of(value, "", leaf_index, role="output")
        except ExportFailed as error:
            call.refusal = first_line(error)
    return None
