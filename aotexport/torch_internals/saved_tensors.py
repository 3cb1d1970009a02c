"""Find the tensors that autograd saved for backward: the memory that each node of its graph reads."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class _PackedTensor:
    """A tensor that autograd saved, in the form it stores; it lives as long as the graph that it was saved for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided

    @property
    def address(self) -> int:
        """Address of its memory; 0: none, as for tensors of traced subgraphs, and for tensor subclasses."""
        return self._tensor.untyped_storage().data_ptr() if self._is_plain else 0


class SavedTensors:
    """The tensors that were saved during `watched`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._saved: weakref.WeakSet[_PackedTensor] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> _PackedTensor:
        """Pack a tensor that autograd saves."""
        packed = _PackedTensor(tensor)
        self._saved.add(packed)
        return packed

    def addresses(self) -> set[int]:
        """Return the addresses of that whose graph still lives."""
        gc.collect(1)  # What the call made is young; looking at all of Python takes longer than an export.
        return {packed.address for packed in self._saved}

    def behind(self, roots: Sequence[Sequence[torch.Tensor]], left: Iterable[torch.Tensor]) -> list[set[int]]:
        """Return, per list of roots, the addresses that a backward pass from them reads.

        Saved tensors that no node shows (those of views that were written to, and of operators in C++) count for all.
        `left` are all tensors that the call left, whose nodes show saved tensors, too.
        """
        bits: dict[Any, int] = {}
        found: list[set[int]] = [set() for _ in roots]
        shown: set[int] = set()
        for node in _in_order([tensor.grad_fn for tensors in roots for tensor in tensors]):
            bits.setdefault(node, 0)
        for index, tensors in enumerate(roots):
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    bits[tensor.grad_fn] |= 1 << index
        for node, own in bits.items():
            for following, _ in node.next_functions:
                if following is not None:
                    bits[following] |= own
            read = _read_by(node)
            shown |= read
            for index, addresses in enumerate(found):
                if own >> index & 1:
                    addresses |= read
        bases = [tensor if tensor._base is None else tensor._base for tensor in left]
        for node in _in_order([tensor.grad_fn for tensor in bases]):
            shown |= _read_by(node)
        hidden = self.addresses() - shown
        return [addresses | hidden for addresses in found]


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """Return the nodes of autograd's graph behind `roots`, each before the nodes its gradients flow to."""
    finished: dict[Any, None] = {}
    seen: set[Any] = set()
    stack = [(root, False) for root in roots if root is not None]
    while stack:
        node, left = stack.pop()
        if left:
            finished[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return list(reversed(finished))


def _read_by(node: Any) -> set[int]:
    """Return the addresses of the tensors that a node saved and `SavedTensors` packed."""
    return {saved.data.address for saved in _saved_by(node) if isinstance(saved.data, _PackedTensor)}


def _saved_by(node: Any) -> Iterator[Any]:
    """Yield the saved tensors of a node, packed."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        for saved in value if isinstance(value, list | tuple) else (value,):
            if hasattr(saved, "unpack_hook"):
                yield saved


@functools.cache
def _fields(type_: type) -> tuple[str, ...]:
    """Return the attributes of a node with its saved tensors, packed: unpacking would recompute a checkpoint."""
    return tuple(name for name in dir(type_) if name.startswith("_raw_saved_"))


@contextlib.contextmanager
def watched() -> Iterator[SavedTensors]:
    """Watch the tensors that autograd saves for backward in this block, in which no backward pass may run."""

    def unpack(packed: _PackedTensor) -> torch.Tensor:
        raise RuntimeError("the model itself runs a backward pass")

    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
        yield saved
