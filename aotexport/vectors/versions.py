"""Versions of inputs: the rises in a call, and the versions that its backward relies on, of one call of eager."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import msgspec
import torch

from aotexport.eager.run import Run, watch_call
from aotexport.encode.program import EncodedProgram, counts_of_parts
from aotexport.errors import AttemptFailed
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.process.blocks import collected_rarely
from aotexport.torch_internals.calls import tree_leaves
from aotexport.torch_internals.saved_tensors import watched
from aotexport.vectors.record import shorter_on_path
from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.call.flat_call import flat_outputs, whole_result_tree
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import (
    FunctionalGraph,
    Gradients,
    IntermediateAlias,
    Program,
    Tangent,
    VersionCheck,
    VersionRise,
)
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.validate.arguments import references
from aotexport_runtime.values.subclasses import is_wrapper
from aotexport_runtime.values.trees import leaves

Visible = tuple[Literal["input", "output"], int]
"""An input or output of a program, which its caller can change."""


@dataclass
class _Seen:
    rises: dict[int, int]
    """The rise of the version, per index of the program's inputs."""
    saves: bool
    """Whether a backward pass reads saved tensors, so that it cannot be repeated."""
    saved: dict[Visible, set[int]] | None = None
    """Per tensor that the caller can change, the tangents for which eager reads its memory in backward."""


def with_versions(run: Run, program: EncodedProgram) -> EncodedProgram:
    """Return the program with the versions and saved tensors of a call of the eager model: they depend on its path."""
    functional = program.record.functional
    if functional is None or (functional.gradients is None and _raises_none(program)):
        return program
    seen = None
    if (shorter := shorter_on_path(program, run.call)) is not None:
        # Eager may refuse sizes that a trace takes.
        with contextlib.suppress(AttemptFailed), attempt("versions of inputs"):
            seen = _observed(run, program.record, functional, shorter)
    if seen is None:
        with attempt("versions of inputs"):
            seen = _observed(run, program.record, functional, run.call)
    graph = program.graphs[functional.file]
    functional = _counted(functional, seen, counts_of_parts(program.record), graph)
    return replace(program, record=msgspec.structs.replace(program.record, functional=functional))


def _observed(run: Run, program: Program, functional: FunctionalGraph, call: ExampleCall) -> _Seen:
    look = functools.partial(_watch, program, functional)
    try:
        return watch_call(run, program, call, functools.partial(look, hooks=watched))
    except RuntimeError:
        # Function transforms and backward passes in the model do not allow such hooks.
        return watch_call(run, program, call, functools.partial(look, hooks=contextlib.nullcontext))


def _raises_none(program: EncodedProgram) -> bool:
    """Return whether no operator of a program raises a version."""
    called = {node.op for graph in program.graphs.values() for node in graph.nodes}
    return all(op.startswith("python::") or (op.startswith("aten::") and not _is_mutable(op)) for op in called)


def _is_mutable(op: str) -> bool:
    base, _, overload = op.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload)._schema.is_mutable


def _watch(
    program: Program, functional: FunctionalGraph, run: Callable[[], Any], inputs: Sequence[Any], hooks: Any
) -> _Seen:
    plain = {i: t for i, t in enumerate(inputs) if _is_plain(t)}
    before = {index: tensor._version for index, tensor in plain.items()}
    with hooks() as saved:
        left = run()
    saves = saved is None or bool(saved.addresses()) or not _repeats(left, inputs)
    seen = _Seen({index: tensor._version - before[index] for index, tensor in plain.items()}, saves)
    if saved is not None and functional.gradients is not None:
        outputs = _outputs(program, left)
        roots = [_roots(t, functional, inputs, outputs) for t in functional.gradients.tangents]
        read = saved.behind(roots, [value for value in outputs.values() if _is_plain(value)])
        seen.saved = {
            which: {index for index, addresses in enumerate(read) if address in addresses}
            for which, address in _visible(plain, outputs)
        }
    return seen


def _visible(inputs: dict[int, torch.Tensor], outputs: dict[int, Any]) -> Iterator[tuple[Visible, int]]:
    """Yield inputs, and outputs of memory of their own, with the address of the memory."""
    addresses: set[int] = {0}
    for index, tensor in inputs.items():
        addresses.add(tensor.untyped_storage().data_ptr())
        yield ("input", index), tensor.untyped_storage().data_ptr()
    for index, value in outputs.items():
        if _is_plain(value) and (address := value.untyped_storage().data_ptr()) not in addresses:
            addresses.add(address)
            yield ("output", index), address


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapper(value) and value.layout is torch.strided


def _outputs(program: Program, left: Any) -> dict[int, Any]:
    """Return the returned outputs of a call, by index; outputs stored elsewhere are not among them."""
    tree = whole_result_tree(program)
    indices = [leaf.index for _, leaf in leaves(tree) if isinstance(leaf, Leaf)]
    values = [value for _, value in flat_outputs(tree, left)]
    return dict(zip(indices, values, strict=True))


def _roots(
    tangent: Tangent, functional: FunctionalGraph, inputs: Sequence[Any], outputs: dict[int, Any]
) -> list[torch.Tensor]:
    """Return the tensors from which gradients come if a tangent is defined; any output, if it is of no returned one."""
    if tangent.of == "mutation":
        found = [inputs[functional.mutations[tangent.index].input_index]]
    elif tangent.of == "output":
        found = [outputs[tangent.index]] if tangent.index in outputs else list(outputs.values())
    else:
        specs = enumerate(functional.outputs)
        views = [i for i, s in specs if isinstance(s, IntermediateAlias) and s.base_index == tangent.index]
        found = [outputs[index] for index in views if index in outputs] or list(outputs.values())
    return [value for value in found if isinstance(value, torch.Tensor)]


def _repeats(left: Any, inputs: Sequence[Any]) -> bool:
    """Return whether two backward passes can be made; hooks do not show numbers that autograd saves as tensors."""
    roots = [value for value in tree_leaves(left) if isinstance(value, torch.Tensor) and value.requires_grad]
    leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf]
    try:
        for _ in range(2):
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            for leaf in leaves:
                leaf.grad = None
    except RuntimeError:
        return False
    return bool(roots)


@collected_rarely()
def _counted(functional: FunctionalGraph, seen: _Seen, counts: Sequence[int], graph: Graph) -> FunctionalGraph:
    """Return the calling convention with the observations; its indices count the parts of tensor subclasses."""
    firsts = [0, *accumulate(counts)]
    risen = {firsts[index]: by for index, by in seen.rises.items()}
    own = {m.input_index: m.data + m.metadata + m.storage for m in functional.mutations}
    rises = tuple(VersionRise(input_index=index, by=by) for index, by in risen.items() if by != own.get(index, 0))
    gradients = functional.gradients
    if gradients is not None:
        written = {mutation.input_index for mutation in functional.mutations if mutation.data}
        moved = {index for index, by in risen.items() if by} - written
        if seen.saved is not None:
            saved = {(of, firsts[i] if of == "input" else i): by for (of, i), by in seen.saved.items()}
            gradients = _checked(gradients, saved, set(own) | moved, len(functional.mutations), graph)
        gradients = _unversioned(gradients, [graph.inputs[index].name for index in moved], graph)
        gradients = msgspec.structs.replace(gradients, saves_nothing=not seen.saves)
    return msgspec.structs.replace(functional, version_rises=rises, gradients=gradients)


def _checked(
    gradients: Gradients, saved: dict[Any, set[int]], changed: set[int], mutations: int, graph: Graph
) -> Gradients:
    """Return the gradients with the version checks of backward, where torch's of what the graph saves are not eager's.

    The new value of a changed input is another tensor than its saved value.
    """
    (partition,) = gradients.partitions
    versioned = [name for name in partition.saved if name not in partition.unchecked]
    own = _read_for(graph, versioned, len(gradients.of_inputs))
    every = set(range(len(gradients.tangents)))
    bases = _bases(graph)
    checks: list[VersionCheck] = []
    loose: list[str] = []
    for (of, index), tangents in sorted(saved.items()):
        value = graph.inputs[index].name if of == "input" else graph.outputs[mutations + index]
        names = {bases.get(name, name) for name in references(value)}
        is_changed = of == "input" and index in changed
        is_saved = not names.isdisjoint(own)
        tangents = tangents.union(*(own.get(name, ()) for name in names if not is_changed))
        if tangents == (every if is_saved else set()) and not is_changed:
            continue
        if not is_changed:
            loose += names
        if tangents:
            checks.append(VersionCheck(of=of, index=index, tangents=tuple(sorted(tangents))))
    return _unversioned(msgspec.structs.replace(gradients, checks=tuple(checks)), loose, graph)


def _read_for(graph: Graph, saved: Sequence[str], inputs: int) -> dict[str, set[int]]:
    """Return, per value whose memory is saved, the tangents for which the backward of a joint graph reads it."""
    viewed = _bases(graph)
    bases = {name: viewed.get(name, name) for name in saved}
    found: dict[str, set[int]] = {base: set() for base in bases.values()}
    tangents = {value.name: {index} for index, value in enumerate(graph.inputs[inputs:])}
    read = {name: {base} for name, base in bases.items()}
    for node in graph.nodes:
        memory = set[str]().union(*(read.get(name, ()) for name in operands(node)))
        sources = set[int]().union(*(tangents.get(name, ()) for name in operands(node)))
        if sources:
            tangents[node.name] = sources
            for base in memory:
                found[base] |= sources
        elif memory and node.name not in bases:
            # Not saved: backward computes it from saved values.
            read[node.name] = memory
    return found


def _unversioned(gradients: Gradients, values: Sequence[str], graph: Graph) -> Gradients:
    (partition,) = gradients.partitions
    bases = _bases(graph)
    unchecked = tuple(n for n in partition.saved if n in partition.unchecked or bases.get(n, n) in values)
    partition = msgspec.structs.replace(partition, unchecked=unchecked)
    return msgspec.structs.replace(gradients, partitions=(partition,))


def _bases(graph: Graph) -> dict[str, str]:
    """Return, per view, the value whose memory and version it shares; other values share theirs with none before."""
    of: dict[str, str] = {}
    for node in graph.nodes:
        base = node.args[0] if node.args else None
        if node.op.removeprefix("aten::").partition(".")[0] in VIEWS and isinstance(base, str):
            of[node.name] = of.get(base, base)
    return of
