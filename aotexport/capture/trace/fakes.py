"""Fake tensors for the inputs of a trace, with symbols for the user's dynamic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.sizes_as_integers import running_function
from aotexport.capture.trace.declared_sizes import constrain, declared_sizes, torch_specs
from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import user_line
from aotexport.model.state import State
from aotexport.model.tensor_kinds import dress
from aotexport.process.patches import patched
from aotexport.torch_internals.calls import FakeTensorMode, is_dimension
from aotexport.torch_internals.general_sizes import (
    counts_kept,
    fixed_symbols,
    general_sizes_kept,
    sizes_from_zero,
    zero_and_one_symbolic,
)
from aotexport.torch_internals.names import int_oo, make_fake_inputs, statically_known_true
from aotexport.torch_internals.patches import constants_in_branches
from aotexport.torch_internals.symbolic_memo import computed_once, made_quickly
from aotexport.values.polynomials import quick_simplification
from aotexport.values.subclasses import encode_subclass
from aotexport_runtime.errors import first_line
from aotexport_runtime.values.subclasses import is_wrapper, with_inner


def sizes_of_data() -> contextlib.AbstractContextManager[None]:
    """Let results have any number of elements that only the data know, and count elements by symbols, quickly."""
    return patched(sizes_from_zero(), counts_kept(), quick_simplification())


@dataclass
class FakeInputs:
    """The fake world of one program.

    Attributes:
        mode: its fake mode, with the shape environment.
        state: one fake per entry of the state.
        arguments: one fake per argument tensor, one symbolic integer per dynamic integer.
        axes: the user's dimension per axis, per argument tensor.
        assumed: assumptions of traces without a guard, see `general_sizes_kept`; without repetitions.
        fixed_at: the user's line that fixed a symbol to a number, by symbol.
        asked_by: the function of torch that asked for the number of a symbol that is fixed; None: none did.
        larger: the values that the arguments' fakes were made of, see `fake_inputs`.
    """

    mode: FakeTensorMode
    state: list[torch.Tensor]
    arguments: list[Any]
    axes: list[dict[int, Any] | None] = field(default_factory=list)
    assumed: dict[Any, None] = field(default_factory=dict)
    fixed_at: dict[Any, str] = field(default_factory=dict)
    asked_by: dict[Any, str | None] = field(default_factory=dict)
    larger: Sequence[Any] | None = None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Let torch assume as little as it can about sizes, and record its assumptions."""
        assert self.mode.shape_env is not None
        with (
            general_sizes_kept(self.assumed.setdefault),
            fixed_symbols(self.mode.shape_env, self._fix, user_line),
            computed_once(self.mode.shape_env),
            made_quickly(self.mode.shape_env),
            sizes_of_data(),
            constants_in_branches(),
        ):
            yield

    def taken_for_granted(self, free: Collection[Any] = ()) -> tuple[Any, ...]:
        """Return the current assumptions about sizes, to compare.

        Args:
            free: symbols whose ranges are left out if they are the widest.
        """
        environment = self.mode.shape_env
        assert environment is not None
        guards = {guard.expr for guard in environment.guards}
        ranges: Any = environment.var_to_range.items()
        bounded = {
            symbol: span for symbol, span in ranges if symbol not in free or (span.lower > 0 or span.upper < int_oo)
        }
        return guards, bounded, set(self.fixed_at), set(self.assumed)

    def _fix(self, symbol: Any, asked: bool) -> None:
        if symbol not in self.fixed_at:
            self.fixed_at[symbol] = user_line()
            self.asked_by[symbol] = (running_function() or "code of the model") if asked else None

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor with fixed sizes."""
        return dress(self.mode.from_tensor(tensor, static_shapes=True), tensor)

    def twins(self, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return fresh fakes with the metadata of `fakes`: a trace may change the fakes it is called with."""
        with self.mode:
            return [dress(_twin(fake), fake) if isinstance(fake, torch.Tensor) else fake for fake in fakes]


class _Arguments(nn.Module):
    def forward(self, *args: Any) -> None:
        """Replace a callable of flat tensors, for torch's checks of dynamic shapes."""


def fake_inputs(call: ExampleCall, state: State, larger: Sequence[Any] | None = None) -> FakeInputs:
    """Return fakes for the example call and the state.

    Args:
        call: the example call.
        state: the module's state.
        larger: values to make the arguments' fakes of instead of the call's tensors, see `larger_tensors`.

    Raises:
        ModelFileInvalid: the dynamic dimensions contradict the example inputs.
        ExportFailed: an argument is a tensor subclass whose context is no data, or with dynamic sizes.
    """
    for path, tensor, axes in zip(call.paths, call.tensors, call.axes, strict=True):
        if encode_subclass(tensor, f"`{path}`") is not None and any(map(is_dimension, (axes or {}).values())):
            raise ExportFailed(
                f"`{path}` is a `{type(tensor).__name__}`, and the sizes of tensor subclasses are fixed in a "
                "bundle: what sizes their parts have is for their class to say. Leave them static, or export variants"
            )
    declared = declared_sizes(call)
    specs, is_small = torch_specs(call), any(size.axis is not None and size.example < 2 for size in declared)
    dynamic_shapes = {"args": tuple(specs)} if any(spec is not None for spec in specs) else None
    try:
        with attempt("fake inputs"), zero_and_one_symbolic(symbolic=larger is None and is_small):
            made = make_fake_inputs(_Arguments(), tuple(larger or call.tensors), {}, dynamic_shapes)
            mode, arguments, *_ = made
            constrain(declared, arguments)
            _fix_layouts(arguments)
    except ExportFailed as refusal:
        raise ModelFileInvalid(
            f"dynamic_shapes do not fit the example inputs: {first_line(refusal.error)}"
        ) from refusal.error
    fakes = FakeInputs(mode, [], list(arguments), call.axes, larger=larger)
    fakes.state = [fakes.fake(entry.tensor) for entry in state.entries]
    return fakes


def _fix_layouts(fakes: Sequence[Any]) -> None:
    """Fix offsets, and strides that are of no sizes, to the example's: torch makes them symbols beside hints.

    No argument of a call says such a symbol; guards compare the numbers where a graph depends on them.
    """
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor) and not is_wrapper(fake)]
    known = {symbol for fake in tensors for size in fake.shape for symbol in _symbols(size)}
    for fake in tensors:
        int(fake.storage_offset())
        for step in fake.stride():
            if not known.issuperset(_symbols(step)):
                int(step)


def _symbols(size: int | torch.SymInt) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def _twin(fake: torch.Tensor) -> torch.Tensor:
    return _like(with_inner(fake, _twin) if is_wrapper(fake) else _plain_twin(fake), fake)


def _plain_twin(fake: torch.Tensor) -> torch.Tensor:
    size, stride, offset = fake.size(), fake.stride(), fake.storage_offset()
    if isinstance(offset, int) and offset == 0:
        twin = torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)
    else:
        room: Any = 1 + offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if not statically_known_true(room >= offset):
            room = torch.sym_max(room, offset)
        base = torch.empty(room, dtype=fake.dtype, device=fake.device)
        twin = torch.empty(0, dtype=fake.dtype, device=fake.device)
        twin.set_(base.untyped_storage(), offset, size, stride)
    return twin


def _like(twin: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return `twin` with the autograd metadata of `fake`: whether it requires grad, is a leaf, is a parameter."""
    if fake.requires_grad:
        twin.requires_grad_(True)
        if not fake.is_leaf:
            memory = None if is_wrapper(twin) else twin.untyped_storage()
            with torch.enable_grad():
                twin = twin.clone()
            if memory is not None:
                with torch.no_grad():
                    twin.set_(memory, fake.storage_offset(), fake.size(), fake.stride())
    if isinstance(fake, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=fake.requires_grad)
    return twin


def is_shaped_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors are known to have the same dtype, sizes and strides."""
    if not isinstance(other, torch.Tensor) or not is_sized_alike(one, other):
        return False
    if is_wrapper(one) or one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout
    axes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(is_equal(size, 1) or is_equal(a, b) for size, a, b in axes)


def is_sized_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are known to have the same dtype and sizes."""
    same = one.dtype == other.dtype and one.dim() == other.dim()
    return same and all(map(is_equal, one.shape, other.shape))


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are known to be equal."""
    return statically_known_true(one == other)
