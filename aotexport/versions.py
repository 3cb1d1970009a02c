"""What autograd counts: by how much a call raises the versions of inputs, and on which of them its backward relies.

A functional graph writes a change once, and saves what its own backward needs; its epilogues owe the caller the
versions of eager, and its backward the same refusals. Both are seen in one call of the eager model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import msgspec
import torch

from aotexport.capture.call import ExampleCall
from aotexport.capture.state import State
from aotexport.encode.program import EncodedProgram, counts_of_parts
from aotexport.torch_internals.names import tree_leaves
from aotexport.vectors.eager import watch_example
from aotexport_runtime.allowed import VIEWS
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph, Gradients, VersionRise
from aotexport_runtime.subclasses import is_wrapper


@dataclass
class _Seen:
    """What was seen of the plain tensors among the inputs.

    Attributes:
        rises: by how much the version rose, per index of the program's inputs.
        saves: whether such a backward pass reads anything, so that it cannot be repeated.
        saved: inputs whose memory a backward pass from what the call leaves behind reads in eager; none where the model
            itself runs backward passes.
    """

    rises: dict[int, int] = field(default_factory=dict)
    saves: bool = True
    saved: set[int] = field(default_factory=set)


def with_versions(call: ExampleCall, state: State, program: EncodedProgram) -> EncodedProgram:
    """Return the program with what autograd counts in a call of the eager model.

    Args:
        call: the example call.
        state: the module's state; left as it was.
        program: the program with its functional graph, if it has one.
    """
    functional = program.record.functional
    if functional is None:
        return program
    try:
        seen = watch_example(call, state, program.record, functools.partial(_watch, hooks=_hooks))
    except RuntimeError:
        # Function transforms in the model bear no such hooks, nor do backward passes.
        seen = watch_example(call, state, program.record, functools.partial(_watch, hooks=contextlib.nullcontext))
    graph = program.graphs[functional.file]
    functional = _counted(functional, seen, counts_of_parts(program.record), graph)
    return replace(program, record=msgspec.structs.replace(program.record, functional=functional))


def _watch(run: Callable[[], Any], inputs: Sequence[Any], hooks: Any) -> _Seen:
    plain = {i: t for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and not is_wrapper(t)}
    before = {index: tensor._version for index, tensor in plain.items()}
    with hooks() as saved:
        left = run()
    pointers = saved() if saved is not None else set()
    seen = _Seen(saves=saved is None or bool(pointers) or not _repeats(left))
    del left
    for index, tensor in plain.items():
        seen.rises[index] = tensor._version - before[index]
        if pointers and tensor.numel() and tensor.untyped_storage().data_ptr() in pointers:
            seen.saved.add(index)
    return seen


def _repeats(left: Any) -> bool:
    """Return whether two backward passes can be made; no hook tells of numbers that autograd saves as tensors."""
    roots = [value for value in tree_leaves(left) if isinstance(value, torch.Tensor) and value.requires_grad]
    try:
        for _ in range(2):
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except RuntimeError:
        return False
    return bool(roots)


class _Saved:
    """What autograd saved, below autograd: it lives as long as the graph that it was saved for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


@contextlib.contextmanager
def _hooks() -> Iterator[Callable[[], set[int]]]:
    """Watch what autograd saves for backward; yield what returns the addresses of that whose graph still lives."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        packed = _Saved(tensor)
        saved.add(packed)
        return packed

    def unpack(packed: _Saved) -> torch.Tensor:
        raise RuntimeError("the model itself runs a backward pass")

    def addresses() -> set[int]:
        gc.collect(1)  # What the call made is young; looking at all of Python takes longer than an export.
        # What has no address is no input: what operators with bodies trace, tensor subclasses.
        return {packed.tensor.untyped_storage().data_ptr() if packed.is_plain else 0 for packed in saved}

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield addresses


def _counted(functional: FunctionalGraph, seen: _Seen, counts: Sequence[int], graph: Graph) -> FunctionalGraph:
    """Return the calling convention with what was seen; its indices count the parts of tensor subclasses."""
    firsts = [0, *accumulate(counts)]
    risen = {firsts[index]: by for index, by in seen.rises.items()}
    saved = {firsts[index] for index in seen.saved}
    own = {m.input_index: m.data + m.metadata + m.storage for m in functional.mutations}
    rises = tuple(VersionRise(input_index=index, by=by) for index, by in risen.items() if by != own.get(index, 0))
    gradients = functional.gradients
    if gradients is not None:
        written = {mutation.input_index for mutation in functional.mutations if mutation.data}
        moved = {index for index, by in risen.items() if by} - written
        gradients = _checked(gradients, saved, set(own) | moved, moved, graph)
        gradients = msgspec.structs.replace(gradients, saves_nothing=not seen.saves)
    return msgspec.structs.replace(functional, version_rises=rises, gradients=gradients)


def _checked(gradients: Gradients, saved: set[int], changed: set[int], moved: set[int], graph: Graph) -> Gradients:
    """Return the gradients with what backward checks.

    Torch checks what the graph saves of the inputs themselves. The new value of a changed one is another tensor; and
    one whose metadata alone changed is saved before its version rises.
    """
    (partition,) = gradients.partitions
    bases = _bases(partition.saved, graph)
    names = [value.name for value in graph.inputs]
    checked = tuple(index for index in sorted(saved) if index in changed or names[index] not in bases.values())
    loose = {*partition.unchecked, *(name for name, base in bases.items() if base in {names[i] for i in moved})}
    unchecked = tuple(name for name in partition.saved if name in loose)
    partition = msgspec.structs.replace(partition, unchecked=unchecked)
    return msgspec.structs.replace(gradients, checked_inputs=checked, partitions=(partition,))


def _bases(names: Sequence[str], graph: Graph) -> dict[str, str]:
    """Return, per name, the value whose memory and version it shares: itself, or what it is a view of."""
    of: dict[str, str] = {}
    for node in graph.nodes:
        base = node.args[0] if node.args else None
        if node.op.removeprefix("aten::").partition(".")[0] in VIEWS and isinstance(base, str):
            of[node.name] = of.get(base, base)
    return {name: of.get(name, name) for name in names}
