"""A program as `torch.export` traces it for ONNX, without changes and aliases, which ONNX models lack."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.onnx.plain import plain
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.values.observe import make_inputs

Trace = tuple[Program, Any, Any]
"""A program in plain tensors, its rebuilt graph, and the trace of that by `torch.export`."""


def traced(bundle: Bundle, program: Program, options: OnnxOptions) -> Trace:
    """Return `program` in plain tensors, its rebuilt graph, and the trace of that by `torch.export`.

    Raises:
        ExportFailed: it cannot be translated, or changes or aliases tensors and the options do not allow it.
    """
    from aotexport.lower.onnx.rebuild import rebuild
    from aotexport.lower.onnx.translate import capture

    if options.state == "refuse":
        _refuse_aliases(bundle, program)
    taken = plain(bundle, program)
    program, namespaces = taken.program, bundle.manifest.requirements.operator_namespaces
    rebuilt = rebuild(program, taken.graph, taken.tensors, namespaces=namespaces)
    exported = capture(program, rebuilt)
    updated = _updated(program, rebuilt, exported) if rebuilt.may_write else []
    if not updated:
        return program, rebuilt, exported
    if options.state == "refuse":
        raise _Stateful(program, f"changes {', '.join(f'`{name}`' for name in updated)}")
    _refuse_shared(bundle, program, updated)
    rebuilt = rebuild(program, taken.graph, taken.tensors, namespaces=namespaces, updated=updated)
    return program, rebuilt, capture(program, rebuilt)


class _Stateful(ExportFailed):
    def __init__(self, program: Program, change: str) -> None:
        super().__init__(
            f"program `{program.name}` {change}, and ONNX models change nothing. Give `--onnx-state=outputs` "
            "(`OnnxOptions(state='outputs')`) to have the new values as further outputs, and views as copies"
        )


def _refuse_aliases(bundle: Bundle, program: Program) -> None:
    """Refuse rebound state, and outputs that share memory with other tensors in the recorded calls."""
    if program.rebinds:
        raise _Stateful(program, f"replaces {', '.join(f'`{rebind.name}`' for rebind in program.rebinds)}")
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        facts = bundle.vector(entry).facts
        for name, fact in facts.items():
            path, mark, _ = name.partition(" shares memory with")
            if mark:
                raise _Stateful(program, f"returns `{path.rpartition(': ')[2]}` as a view of `{fact}`")


def _updated(program: Program, rebuilt: Any, exported: Any) -> list[str]:
    """Return the names of the state tensors and the paths of the arguments that the traced graph writes to."""
    from aotexport.lower.onnx.translate import functional

    written = functional(program, exported)
    signature = written.graph_signature
    shapes = {node.name: _shape(node.meta.get("val")) for node in written.graph.nodes}
    for result, name in {**signature.user_inputs_to_mutate, **signature.buffers_to_mutate}.items():
        placeholder = next((key for key, value in signature.inputs_to_buffers.items() if value == name), name)
        if shapes[result] != shapes[placeholder]:
            raise ExportFailed(
                f"program `{program.name}` changes values and sizes of a tensor at once, which has no ONNX "
                "form. Let it change values alone"
            )
    arguments = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    paths = {spec.path for spec in arguments}
    state = [rebuilt.state[name.rpartition(".")[2]] for name in signature.buffers_to_mutate.values()]
    order = list(signature.user_inputs)
    changed = [arguments[order.index(name)].path for name in signature.user_inputs_to_mutate.values()]
    ambiguous = [name for name in (*state, *changed) if name in rebuilt.state.values() and name in paths]
    if ambiguous:
        raise ExportFailed(
            f"program `{program.name}` changes `{ambiguous[0]}`, the name of an argument and of a state tensor, and "
            "ONNX models have one name space. Rename the argument"
        )
    return [*state, *changed]


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _refuse_shared(bundle: Bundle, program: Program, updated: Collection[str]) -> None:
    """Refuse arguments that a program writes to and that share memory with others in the recorded calls."""
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        vector, stored = read_vector(bundle, entry)
        values = make_inputs(vector.inputs, stored, None, Environment().form).values
        tensors = {spec.path: value for spec, value in zip(vector.inputs, values, strict=True) if _is_tensor(value)}
        for path, value in tensors.items():
            if path in updated and any(other != path and _overlap(value, tensors[other]) for other in tensors):
                raise ExportFailed(
                    f"program `{program.name}` changes `{path}`, which shares memory with another argument in the "
                    "recorded call, and ONNX models know no memory. Export with arguments that share none"
                )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the memory ranges of two tensors overlap."""
    return bool(a.numel() and b.numel()) and a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: torch.Tensor) -> int:
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + span * tensor.element_size()
