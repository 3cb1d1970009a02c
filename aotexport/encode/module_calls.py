"""Encode traced calls of submodules as runs of an encoded graph's nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from aotexport.capture.effects.module_calls import CLOCK, TracedCall
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.encode.values import encode_argument
from aotexport.errors import ExportFailed
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.graph import Graph, ModuleCall
from aotexport_runtime.schema.values import Argument


def with_calls(graph: Graph, forward: ForwardCapture, names: Mapping[torch.fx.Node, Argument]) -> Graph:
    """Return the record of a forward graph with the calls of submodules.

    Args:
        graph: the record.
        forward: the capture that it was encoded from.
        names: name in the record per node that it has.
    """
    times = _times(forward.graph)
    modules = {path: index for index, path in enumerate(graph.modules)}
    calls: list[ModuleCall] = []
    around: list[int] = []
    for index, call in enumerate(forward.calls if times == sorted(times) else ()):
        while around and forward.calls[around[-1]].end <= call.begin:
            around.pop()
        parent = around[-1] if around else None
        around.append(index)
        module = modules.setdefault(call.path, len(modules))
        begin, end = bisect_left(times, call.begin), bisect_left(times, call.end)
        record = ModuleCall(module=module, begin=begin, end=end, parent=parent)
        try:
            calls.append(_with_structures(record, call, names))
        except ExportFailed as error:
            calls.append(msgspec.structs.replace(record, refusal=first_line(error)))
    return msgspec.structs.replace(graph, modules=tuple(modules), calls=tuple(calls))


def _times(module: torch.fx.GraphModule) -> list[int]:
    """Return when each node was traced; a node inserted later has the time of the node before it."""
    times: list[int] = []
    for node in (node for node in module.graph.nodes if node.op == "call_function"):
        time = (node.meta.get("custom") or {}).get(CLOCK)
        times.append(time if time is not None else times[-1] if times else 0)
    return times


def _with_structures(record: ModuleCall, call: TracedCall, names: Mapping[torch.fx.Node, Argument]) -> ModuleCall:
    if call.refusal is not None or call.arguments is None or call.result is None:
        raise ExportFailed(call.refusal or "it does not return")
    values = [_value(value, names, f"a call of `{call.path}`") for value in call.values]
    return msgspec.structs.replace(record, arguments=call.arguments, result=call.result, values=values)


def _value(value: Any, names: Mapping[torch.fx.Node, Argument], where: str) -> Argument:
    if isinstance(value, torch.fx.Node) and value not in names:
        return None
    return encode_argument(value, names, where)
