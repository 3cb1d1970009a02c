"""Guards of functional graphs: the forward graph, which is as general as the user's code, serves other calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotexport_runtime.engines.engine import Native
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import autocast_dtype
from aotexport_runtime.guards.arguments import same_layout, value_of
from aotexport_runtime.guards.caller import without_autocast
from aotexport_runtime.guards.rule import Call, GuardSource, Row, input_name
from aotexport_runtime.rewrite.partition import reached_in_part
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import ArgumentInput, FunctionalGraph, InputAlias, Program, SizeInput, StateInput
from aotexport_runtime.values import sizes

_Tensors = list[tuple[int, ArgumentInput | StateInput]]


def _tensors(program: Program) -> _Tensors:
    return [(index, spec) for index, spec in enumerate(program.inputs) if not isinstance(spec, SizeInput)]


def caller_rows(program: Program, record: FunctionalGraph, device_type: str) -> list[Row]:
    """Return the guards of the modes around a call and of what requires grad; `program` takes tensor subclasses whole.

    `device_type`: type of the devices that it runs on.
    """
    tensors = _tensors(program)
    some = _some_require_grad(index for index, _ in tensors)
    found = [
        Row("mode", lambda source: f"not {source.ask(transforms.active)}", "function transforms"),
        # Under the caller's autocast every operator chooses its dtype anew; only the forward graph does so.
        Row(
            "mode",
            lambda source: f"{source.ask(autocast_dtype, source.constant(device_type))} is None",
            "autocast around the call",
            quick=lambda source: without_autocast(source, device_type),
        ),
    ]
    nothing, others = "no gradients are recorded", "gradients of an inference program"
    if record.gradients is None:
        records = Row(
            "tensor",
            lambda source: f"not ({source.ask(torch.is_grad_enabled)} and ({some}))",
            others,
            held=lambda source: f"not {source.ask(torch.is_grad_enabled)}",
        )
        return [*found, records]
    # A region of a program without gradients may record some. Under the caller's grad mode there are more.
    found += [
        Row("mode", lambda source: source.ask(torch.is_grad_enabled), nothing)
        if program.grad
        else Row("mode", "False", others),
        Row("tensor", some, nothing),
    ]
    if record.mutations:
        # A checkpoint ends its second run where the last tensor is saved: with all changes that eager makes before.
        words = "a checkpoint, which may end the call before its changes"
        found.append(Row("mode", lambda source: f"not {source.ask(transforms.checkpointed)}", words))
    for index, spec in tensors:
        if not spec.meta.requires_grad:
            words = f"input {index} requires grad, and did not at capture"
            found.append(Row("tensor", f"not {input_name(index)}.requires_grad", words))
    return found


def input_rows(program: Program, record: FunctionalGraph, graph: Graph, *, holds_state: bool) -> list[Row]:
    """Return the guards of the inputs of a functional graph; those of `program` are tensor subclasses taken apart.

    `holds_state`: whether native code asks for the state of the load, whose strides are known.
    """
    tensors, gradients = _tensors(program), record.gradients
    integers = {spec.symbol for spec in program.inputs if isinstance(spec, SizeInput)}
    empty = "a size is 0, and kernels of functional graphs do not all bear that"
    found = [
        Row("sizes", lambda source, symbol=each.symbol: f"{source.size(symbol)} != 0", empty)
        for each in program.dimensions
        if each.symbol not in integers
    ]
    found += [
        Row("sizes", lambda source, guard=guard: source.condition(guard), f"the graph assumes {sizes.describe(guard)}")
        for guard in record.guards
    ]
    found += [_laid_out(*each, is_held=holds_state and isinstance(each[1], StateInput)) for each in tensors]
    for index, spec in tensors:
        if isinstance(spec, ArgumentInput) and spec.meta.dtype.startswith(("complex", "float", "bfloat")):
            conjugated = f" and not {input_name(index)}.is_conj()" if spec.meta.dtype.startswith("complex") else ""
            words = f"input {index} is a conjugated or negated view"
            found.append(Row("tensor", f"not {input_name(index)}.is_neg(){conjugated}", words))
    if gradients is not None:
        detached = gradients.detached_inputs
        with_grad = _some_require_grad(index for index, _ in tensors if index not in detached)
        # If gradients flow to all inputs, a row of the caller asks the same.
        quick = None if detached else "True"
        found.append(Row("tensor", with_grad, "only inputs that get no gradient require grad", quick))
    # A joint backward would call them with None for outputs that have no gradient with regard to the input.
    for index in reached_in_part(graph, record):
        words = f"input {index} has hooks, and some outputs have no gradient with regard to it"
        found.append(Row("tensor", f"not {input_name(index)}._backward_hooks", words))
    for mutation in record.mutations if gradients is not None else ():
        index, is_leaf = mutation.input_index, mutation.is_leaf
        if mutation.requires_grad:
            words = f"mutated input {index} is {'no' if is_leaf else 'a'} leaf, unlike at capture"
            found.append(Row("tensor", f"{input_name(index)}.is_leaf is {is_leaf}", words))
    found += [_begins(*each) for each in _with_offsets(tensors, record, graph)]
    if record.mutations and any(isinstance(spec, ArgumentInput) for _, spec in tensors):
        found.append(_apart(tensors, {mutation.input_index for mutation in record.mutations}))
    return found


def _some_require_grad(indices: Iterable[int]) -> str:
    return " or ".join(f"{input_name(index)}.requires_grad" for index in indices) or "False"


def _laid_out(index: int, spec: ArgumentInput | StateInput, *, is_held: bool) -> Row:
    value, stride = input_name(index), spec.meta.stride

    def equal(source: GuardSource) -> str:
        return f"{value}.stride() == {source.shape(stride)}"

    def same(source: GuardSource) -> str:
        return (
            f"{equal(source)} or {source.ask(same_layout, f'{value}.shape', f'{value}.stride()', source.shape(stride))}"
        )

    def message(call: Call) -> str:
        expected = tuple(value_of(step, call.symbols) for step in stride)
        return f"input {index} has strides {call.inputs[index].stride()}, captured with {expected}"

    return Row("sizes", same, message, quick="True" if is_held else equal, stricter=True)


def _begins(index: int, spec: ArgumentInput | StateInput) -> Row:
    return Row(
        "sizes",
        lambda source: f"{input_name(index)}.storage_offset() == {source.size(spec.meta.offset)}",
        f"input {index} does not begin where it did in its storage at capture",
        held="" if isinstance(spec, StateInput) else None,
    )


def _with_offsets(tensors: _Tensors, record: FunctionalGraph, graph: Graph) -> _Tensors:
    """Return the inputs whose storage offset matters.

    A view without recorded steps is made by `as_strided` with its offset in the graph. If the graph writes to the base,
    that offset is into a new tensor, and right for the caller's only if the base begins where it did at capture; the
    same holds if the graph also changes its metadata. An `as_strided` in the graph counts from the caller's storage.
    """
    if any(node.op.startswith("aten::as_strided") for node in graph.nodes):
        return tensors
    written = {mutation.input_index for mutation in record.mutations if mutation.data}
    viewed = {o.input_index for o in record.outputs if isinstance(o, InputAlias) and o.steps is None}
    moved = {mutation.input_index for mutation in record.mutations if mutation.data and mutation.metadata}
    return [(index, spec) for index, spec in tensors if index in (written & viewed) | moved]


def _apart(tensors: _Tensors, mutated: set[int]) -> Row:
    def share_memory(*values: torch.Tensor) -> bool:
        """Return whether a changed tensor's storage overlaps that of another, as of two views of a NumPy array."""
        spans: list[tuple[int, int, bool]] = []
        for (index, _), tensor in zip(tensors, values, strict=True):
            storage = tensor.untyped_storage()
            if pointer := storage.data_ptr():
                spans.append((pointer, pointer + storage.nbytes(), index in mutated))
        spans.sort()
        end, was_mutated = 0, False
        for low, high, is_mutated in spans:
            if low < end and (was_mutated or is_mutated):
                return True
            was_mutated = is_mutated
            end = max(end, high)
        return False

    return Row(
        "memory",
        lambda source: f"not {source.ask(share_memory, *(input_name(index) for index, _ in tensors))}",
        "a mutated input shares memory with another input",
    )


def direct_rows(indices: Sequence[int]) -> list[Row]:
    """Return conditions of quick paths that pass inputs straight to a joint graph's autograd function."""

    def alive(index: int) -> Row:
        return Row("tensor", lambda source: f"not {source.ask(transforms.may_be_dead, input_name(index))}", None)

    return [*map(alive, indices)]


def native_rows(native: Native, gradients: Sequence[int | None], symbols: Sequence[str], count: int) -> list[Row]:
    """Return the guards of the calls that native code serves, of a graph with `count` inputs.

    `gradients`: per input of a joint graph the index of its gradient; empty: it is no joint graph.
    """
    wanted = [f"{input_name(index)}.requires_grad" for index, gradient in enumerate(gradients) if gradient is not None]
    inputs = ", ".join(map(input_name, range(count)))
    return [
        *([Row("tensor", " and ".join(wanted), "not every gradient is wanted")] if wanted else []),
        Row(
            "memory",
            lambda source: f"{source.ask(native.why_not, f'[{inputs}]', source.values_of(symbols))} is None",
            lambda call: str(native.why_not(call.inputs, call.symbols)),
            held=lambda source: "" if native.is_held is None else source.ask(native.is_held),
        ),
    ]
