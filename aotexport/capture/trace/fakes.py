"""Fake tensors for the inputs of a trace, with symbols for the user's dynamic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from aotexport.capture.effects.sizes_as_integers import running_function
from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import user_line
from aotexport.model.state import State
from aotexport.model.tensor_kinds import dress
from aotexport.process.patches import patched
from aotexport.torch_internals.calls import FakeTensorMode, is_dimension, is_required_dimension
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
        ranges = environment.var_to_range.items()
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
        encode_subclass(tensor, f"`{path}`")
        if is_wrapper(tensor) and any(map(is_dimension, (axes or {}).values())):
            raise ExportFailed(
                f"`{path}` is a `{type(tensor).__name__}`, and the sizes of tensor subclasses are fixed in a bundle: "
                "what sizes their parts have is for their class to say. Leave them static, or export variants"
            )
    specs = [
        axes if isinstance(leaf, torch.Tensor) or axes is None else integer_hint(axes[0])
        for leaf, axes in zip(call.tensors, call.axes, strict=True)
    ]
    _check_ranges(call)
    dynamic_shapes = {"args": tuple(specs)} if any(spec is not None for spec in specs) else None
    try:
        with attempt("fake inputs"), zero_and_one_symbolic(symbolic=larger is None and _is_small(call)):
            made = make_fake_inputs(_Arguments(), tuple(larger or call.tensors), {}, dynamic_shapes)
            mode, arguments, *_ = made
            _bound(call, arguments)
            _relate_sizes(call, arguments)
            _fix_offsets(arguments)
    except ExportFailed as refusal:
        raise ModelFileInvalid(
            f"dynamic_shapes do not fit the example inputs: {first_line(refusal.error)}"
        ) from refusal.error
    fakes = FakeInputs(mode, [], list(arguments), call.axes, larger=larger)
    fakes.state = [fakes.fake(entry.tensor) for entry in state.entries]
    return fakes


def _is_small(call: ExampleCall) -> bool:
    """Return whether a size of the example that is declared dynamic is 0 or 1."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.shape[axis] < 2 and is_dimension(dimension)
        for leaf, axes in zip(call.tensors, call.axes, strict=True)
        for axis, dimension in (axes or {}).items()
    )


def integer_hint(dimension: Any) -> Any:
    """Return torch's hint for a dynamic integer, for which it takes no named dimensions."""
    return Dim.DYNAMIC if is_required_dimension(dimension) else Dim.AUTO


def _check_ranges(call: ExampleCall) -> None:
    """Refuse ranges that do not contain the example's size."""
    for leaf, axes, path in zip(call.tensors, call.axes, call.paths, strict=True):
        for axis, dimension in (axes or {}).items():
            if not is_dimension(dimension):
                continue
            is_tensor = isinstance(leaf, torch.Tensor)
            example = leaf.shape[axis] if is_tensor else leaf
            low, high = range_of(dimension)
            if (low is not None and example < low) or (high is not None and example > high):
                raise ModelFileInvalid(
                    f"dynamic_shapes: `{place(path, axis if is_tensor else None)}` is {example} in the example inputs, "
                    f"outside of [{'' if low is None else low}:{'' if high is None else high}]"
                )


def _bound(call: ExampleCall, fakes: Sequence[Any]) -> None:
    """Give symbols the ranges that torch does not take from the user: those of integers, and of hints."""
    for fake, leaf, axes in zip(fakes, call.tensors, call.axes, strict=True):
        for axis, dimension in (axes or {}).items():
            is_tensor = isinstance(leaf, torch.Tensor)
            if not is_dimension(dimension) or (is_tensor and hasattr(dimension, "__name__")):
                continue
            size = fake.shape[axis] if is_tensor else fake
            if isinstance(size, torch.SymInt):
                low, high = range_of(dimension)
                bounds = (-int_oo if low is None else low, int_oo if high is None else high)
                size.node.shape_env.constrain_symbol_range(size.node.expr, *bounds)


def range_of(dimension: Any) -> tuple[int | None, int | None]:
    """Return the least and greatest value of the user's dimension; None: there is none.

    Torch refuses to give the bounds of a derived dimension below 0, which an integer may have.
    """
    root = getattr(dimension, "root", dimension)
    bounds = (getattr(root, bound, None) for bound in ("min", "max"))
    known = (int(bound) if isinstance(bound, int) else None for bound in bounds)
    low, high = known if root is dimension else (None if bound is None else dimension.fn(bound) for bound in known)
    return low, high


def place(path: str, axis: int | None) -> str:
    """Return the Python expression of a size (an integer, with no axis) of the call."""
    return path if axis is None else f"{path}.shape[{axis}]"


def _fix_offsets(fakes: Sequence[Any]) -> None:
    """Fix where arguments begin in their memory to the example's numbers: torch makes them symbols beside hints.

    No argument of a call says such a symbol; guards compare the numbers where a graph depends on them.
    """
    for fake in fakes:
        if isinstance(fake, torch.Tensor) and not is_wrapper(fake):
            int(fake.storage_offset())


@dataclass(frozen=True)
class _NamedSize:
    """A size that the user named: `factor * root + offset`."""

    factor: int
    offset: int
    size: Any
    example: int
    where: str

    def derived_from(self, other: _NamedSize, size: Any) -> Any:
        """Return this size for the value `size` of `other`."""
        if (self.factor, self.offset) == (other.factor, other.offset):
            return size
        return self.factor * ((size - other.offset) // other.factor) + self.offset


def _relate_sizes(call: ExampleCall, fakes: Sequence[Any]) -> None:
    """Let the shape environment assume the relations of the user's names: equality, or `2 * half` where derived.

    Calls must meet these relations even where the model does not need them.
    """
    for name, (first, *others) in _named_sizes(call, fakes).items():
        torch._check((first.size - first.offset) % first.factor == 0)
        for other in others:
            expected = other.derived_from(first, first.example)
            if other.example != expected:
                raise ModelFileInvalid(
                    f"dynamic_shapes: {first.where} is {first.example} in the example inputs, so with the dimension "
                    f"`{name}` {other.where} must be {expected}; it is {other.example}"
                )
            torch._check(other.size == other.derived_from(first, first.size))


def _named_sizes(call: ExampleCall, fakes: Sequence[Any]) -> dict[str, list[_NamedSize]]:
    """Return the named sizes by the name of their root, roots before the sizes derived from them."""
    found: dict[str, list[_NamedSize]] = {}
    for fake, tensor, axes, path in zip(fakes, call.tensors, call.axes, call.paths, strict=True):
        for axis, dimension in (axes or {}).items():
            root = getattr(dimension, "root", dimension)
            # Hints (`Dim.AUTO`) and fixed sizes have no name.
            if not hasattr(root, "__name__"):
                continue
            offset, at_one = (0, 1) if root is dimension else (dimension.fn(0), dimension.fn(1))
            if isinstance(tensor, torch.Tensor):
                value, example, where = fake.shape[axis], tensor.shape[axis], f"axis {axis} of `{path}`"
            else:
                value, example, where = fake, tensor, f"`{path}`"
            size = _NamedSize(at_one - offset, offset, value, example, where)
            found.setdefault(root.__name__, []).append(size)
    return {name: sorted(sizes, key=lambda s: (s.factor, abs(s.offset))) for name, sizes in found.items()}


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
