"""Calls of a program that has an ONNX model, and what the model shows of them: outputs and changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.values.compare import NORM, NORMS
from aotexport_runtime.values.observe import Inputs, Observation, make_inputs, observe
from aotexport_runtime.values.trees import leaves

ORDERS = {"aten::topk.default": 2, "aten::sort.default": 1, "aten::argsort.default": 1}
"""Position of the axis among the operands of operators that order values."""

FlatCall = Callable[[list[Any]], list[tuple[str, Any]]]
"""Calls a program with flat arguments, which it may write to; returns its outputs with their paths."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Consecutive calls with the same flat arguments.

    Attributes:
        count: number of calls.
        expected: outputs and changes.
        eager_errors: see `Vector`.
    """

    name: str
    values: list[Any]
    count: int
    expected: Observation = field(default_factory=Observation)  # pyrefly: ignore[bad-assignment]
    eager_errors: dict[str, float] = field(default_factory=dict)


def recorded(bundle: Bundle, program: Program, model: OnnxModel) -> list[Calls]:
    """Return the recorded calls, with eager's outputs and changes."""
    found: list[Calls] = []
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        made = make_inputs(vector.inputs, stored, None, Environment().form).values
        values = [value.detach() if isinstance(value, torch.Tensor) else value for value in made]
        calls = Calls(name=entry.name, values=values, count=calls_of(program, model, vector.calls))
        expected = _shown(program, model, calls.count, recorded_observation(vector, stored))
        found.append(replace(calls, expected=expected, eager_errors=vector.eager_errors))
    return found


def _shown(program: Program, model: OnnxModel, count: int, seen: Observation) -> Observation:
    """Return what an ONNX model has too of an observation: dtype, shape and value of outputs and changes."""
    changed, found = changed_names(program, model), Observation(sample=seen.sample)
    names = [path for path, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)]
    names += [shown for name in changed for shown in (f"{name} afterwards", f"state {name}")]
    for name in [f"call {number}: {name}" for number in range(count) for name in names]:
        if name in seen.facts:
            found.facts[name] = seen.facts[name].partition(" strides ")[0]
            found.values |= {key: seen.values[key] for key in (name, name + NORM, name + NORMS) if key in seen.values}
    return found


def changed_names(program: Program, model: OnnxModel) -> list[str]:
    """Return the names of state tensors, and paths of arguments, that a call changes or replaces."""
    return sorted({rebind.name for rebind in program.rebinds} | {*model.updates})


def calls_of(program: Program, model: OnnxModel, calls: int) -> int:
    """Return the number of calls worth comparing: one if nothing is changed."""
    return calls if changed_names(program, model) else 1


def calling(program: Program, run: Callable[..., Any], state: Callable[[], Mapping[str, Any]]) -> FlatCall:
    """Return the call of a program by `run`, which takes arguments as the module does, and of the state given."""
    arguments = arguments_of(program)

    def call(values: list[Any]) -> list[tuple[str, Any]]:
        args, kwargs = arguments(values, defaultdict(lambda: None, state()))
        with torch.no_grad():
            return flat_outputs(program.output_tree, run(*args, **kwargs))

    return call


def observed(
    program: Program, model: OnnxModel, calls: Calls, call: FlatCall, state: Callable[[], Mapping[str, Any]]
) -> Observation:
    """Return what consecutive calls show that an ONNX model has too; `state` returns the current state by name."""
    changed = changed_names(program, model)
    seen = observe(
        call,
        lambda: Inputs([_copied(value) for value in calls.values], [None] * len(calls.values)),
        [spec.path for spec in program.inputs if not isinstance(spec, StateInput)],
        lambda: {name: _tensor(value) for name, value in state().items() if name in changed},
        lambda outputs: [(path, _tensor(value)) for path, value in outputs],
        seed=0,
        calls=calls.count,
        backward=False,
        sample=calls.expected.sample,
    )
    return _shown(program, model, calls.count, seen)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    """Return an array as a tensor: a call without tensors has arrays as outputs."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


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
