"""Recorded calls of a program that has an ONNX model: what the model has too, outputs and changes, by ONNX Runtime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.values.compare import NORM, NORMS
from aotexport_runtime.values.observe import Observation, make_inputs
from aotexport_runtime.values.trees import leaves

ORDERS = {"aten::topk.default": 2, "aten::sort.default": 1, "aten::argsort.default": 1}
"""Position of the axis among the operands of operators that order values."""
_AFTER, _STATE = " afterwards", "state "


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Consecutive calls with the same flat arguments.

    Attributes:
        count: number of calls.
        expected: outputs and changes.
        refused: why there is nothing to compare with; empty: there is.
        eager_errors: see `Vector`.
    """

    name: str
    values: list[Any]
    count: int
    expected: Observation
    refused: str = ""
    eager_errors: dict[str, float] = field(default_factory=dict)


def recorded(bundle: Bundle, program: Program, model: OnnxModel) -> list[Calls]:
    """Return the recorded calls, with eager's outputs and changes."""
    found: list[Calls] = []
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        expected = Observation(sample=vector.sample)
        for name in _noted(program, model, vector):
            expected.facts[name] = vector.facts[name].partition(" strides ")[0]
            for key in (name, name + NORM, name + NORMS):
                if key in vector.values:
                    expected.values[key] = stored[f"v{vector.values.index(key)}"]
        values = [_detached(value) for value in values]
        count, errors = calls_of(program, model, vector.calls), vector.eager_errors
        found.append(Calls(name=entry.name, values=values, count=count, expected=expected, eager_errors=errors))
    return found


def _noted(program: Program, model: OnnxModel, vector: Vector) -> Iterator[str]:
    """Yield the names in an observation that an ONNX model has too: outputs and changes."""
    changed = changed_names(program, model)
    names = [path for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
    names += [path + _AFTER for path in changed] + [_STATE + name for name in changed]
    for number in range(calls_of(program, model, vector.calls)):
        yield from (name for name in (f"call {number}: {name}" for name in names) if name in vector.facts)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def copied(value: Any) -> Any:
    """Return a copy of a tensor, or the number."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def changed_names(program: Program, model: OnnxModel) -> list[str]:
    """Return the names of state tensors, and paths of arguments, that a call changes or replaces."""
    return sorted({rebind.name for rebind in program.rebinds} | {*model.updates})


def calls_of(program: Program, model: OnnxModel, calls: int) -> int:
    """Return the number of calls worth comparing: one if nothing is changed."""
    return calls if changed_names(program, model) else 1


def observed(
    program: Program, model: OnnxModel, calls: Calls, run: Callable[..., Any], state: dict[str, Any]
) -> Observation:
    """Return what consecutive calls of an ONNX model by `run` show, from its `state` at first, which is emptied."""
    state.clear()
    got = Observation(sample=calls.expected.sample)
    for number in range(calls.count):
        run_call(got, f"call {number}: ", program, changed_names(program, model), run, calls.values, lambda: state)
    return got


def run_call(
    seen: Observation,
    where: str,
    program: Program,
    changed: Collection[str],
    run: Callable[..., Any],
    values: Sequence[Any],
    state: Callable[[], Mapping[str, Any]],
) -> None:
    """Call a program with copies of flat arguments; note its outputs and changes."""
    values = [copied(value) for value in values]
    for path, value in outputs_of(program, run, values, state()).items():
        note_output(seen, where + path, value)
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
    for path, value in zip(paths, values, strict=True):
        if path in changed:
            note_output(seen, f"{where}{path}{_AFTER}", value)
    for name in changed:
        if name not in paths:
            note_output(seen, f"{where}{_STATE}{name}", state()[name])


def outputs_of(
    program: Program, run: Callable[..., Any], values: Sequence[Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a program with flat arguments, which it may write to; return its outputs by path."""
    args, kwargs = arguments_of(program)(values, defaultdict(lambda: None, state))
    with torch.no_grad():
        returned = run(*args, **kwargs)
    return dict(flat_outputs(program.output_tree, returned))


def order_of(graph: Graph, output: Any) -> Node | None:
    """Return the node that orders values, and whose indices an output may be; None: the output is of another one."""
    nodes: dict[Any, Node] = {node.name: node for node in graph.nodes}
    node = nodes.get(output) if isinstance(output, str) else None
    if node is not None and node.op == "python::getitem":
        node = nodes.get(node.args[0])
    return node if node is not None and node.op in ORDERS else None


def without_orders(graph: Graph, program: Program, calls: Calls) -> list[str]:
    """Return paths of indices that tell an order, and leave their values out of `calls`: equal values have several."""
    found = [
        path
        for path, leaf in leaves(program.output_tree, "output")
        if isinstance(leaf, Leaf)
        and order_of(graph, graph.outputs[leaf.index]) is not None
        and (meta := program.outputs[leaf.index]) is not None
        and meta.dtype == "int64"
    ]
    for name in [f"call {number}: {path}" for number in range(calls.count) for path in found]:
        for key in (name, name + NORM, name + NORMS):
            calls.expected.values.pop(key, None)
    return found


def note_output(seen: Observation, path: str, value: Any) -> None:
    """Note value, dtype and shape of an output, the only facts that ONNX has."""
    if isinstance(value, np.ndarray):
        # The output of a call without tensors.
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        seen.facts[path] = repr(value)
        return
    seen.tensor(path, value)
    seen.facts[path] = seen.facts[path].partition(" strides ")[0]
