"""Tensors that the model's code reaches outside of modules' tables: by attributes of objects, closures, globals.

A trace would run operators of autograd on the tensors themselves: a write under grad mode would give them a history.
So torch's functions get proxies, and the tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotexport.capture.effects.patched import INDEXING, without_arrays
from aotexport.capture.effects.recurrence import UNPACKING, unpacked
from aotexport.capture.trace.fakes import FakeInputs
from aotexport.torch_internals.outside import record_attribute, without_modes
from aotexport.torch_internals.tracing import current_tracer

_TENSOR = torch.Tensor
_READS = frozenset(
    (
        *(_TENSOR.item, _TENSOR.tolist, _TENSOR.numpy, _TENSOR.data_ptr, _TENSOR.__repr__, _TENSOR.__format__),
        *(_TENSOR.__bool__, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.__index__, _TENSOR.__complex__),
        *(_TENSOR.__array__, _TENSOR.__deepcopy__),
    )
)
"""Functions that return values to Python: called on the tensor itself until the call has written to it."""


class OutsideTensors(TorchFunctionMode):
    """Pass one proxy per tensor to torch's functions, during a trace."""

    def __init__(
        self, fakes: FakeInputs, outside: Iterable[torch.Tensor], known: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Begin with the tensors that have a proxy already.

        Args:
            fakes: the fake world of the trace.
            outside: tensors to make proxies of, when used.
            known: tensors with their fakes.
        """
        super().__init__()
        self._fakes = fakes
        self._tracer = current_tracer()
        self._outside = {id(tensor): tensor for tensor in outside}
        self._found = {id(tensor): (fake, fake._version) for tensor, fake in known if id(tensor) in self._outside}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on proxies; see `torch.overrides`."""
        kwargs = kwargs or {}
        args = without_arrays(args) if func in INDEXING else args
        if self._takes_outside(args) or (kwargs and self._takes_outside(kwargs.values())):
            if func in _READS and not self._is_written(args[0]):
                return func(*args, **kwargs)
            args = self.proxied(args)
            kwargs = {name: self.proxied(value) for name, value in kwargs.items()}
        found = unpacked(*args) if func in UNPACKING and not kwargs else NotImplemented
        return func(*args, **kwargs) if found is NotImplemented else found

    def _takes_outside(self, values: Iterable[Any]) -> bool:
        outside = self._outside
        return any(
            self._takes_outside(value) if type(value) in (list, tuple) else id(value) in outside for value in values
        )

    def proxied(self, value: Any) -> Any:
        """Return a value with its tensors replaced by proxies."""
        if type(value) in (list, tuple):
            return type(value)(map(self.proxied, value))
        return self._proxy(value) if id(value) in self._outside else value

    def _proxy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the proxy of a tensor; made, and recorded in the trace, at first use."""
        if id(tensor) not in self._found:
            with without_modes():
                fake = self._fakes.twins([self._fakes.fake(tensor)])[0]
            if self._tracer is not None:
                record_attribute(self._tracer, tensor, fake)
            self._found[id(tensor)] = fake, fake._version
        return self._found[id(tensor)][0]

    def _is_written(self, tensor: torch.Tensor) -> bool:
        fake, version = self._found.get(id(tensor), (None, 0))
        return fake is not None and fake._version != version
