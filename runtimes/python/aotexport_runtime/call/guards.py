"""Guards: does a call fit the captured program?

Two kinds. A *hard* guard says that no graph of the program is right for the call (dtype, rank, a static size, a
range): the call is refused, all violations at once. A *soft* guard says that only the functional graph is
specialised too far (strides, aliasing between arguments, which inputs require grad): then the forward graph, which
is as general as the user's code, serves the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aotexport_runtime.engines.partition import reached_in_part
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import (
    ArgumentInput,
    FunctionalGraph,
    InputAlias,
    Program,
    SizeInput,
    StateInput,
)
from aotexport_runtime.schema.sizes import Dimension, Size
from aotexport_runtime.values import sizes
from aotexport_runtime.values.subclasses import Form, is_wrapper, parts
from aotexport_runtime.values.tensors import Array, is_tensor

if TYPE_CHECKING:
    import torch


class Guards:
    """The guards of one program."""

    def __init__(self, program: Program, device: torch.device | None, forms: Mapping[int, Form] | None = None) -> None:
        """Prepare the guards of `program`.

        Args:
            program: its record.
            device: where it was loaded to; None: where it was captured.
            forms: structure per input that is a tensor subclass.
        """
        self._forms = forms or {}
        self._program = program
        self._device = device
        self._names = {dimension.symbol: dimension.name for dimension in program.dimensions}
        self._arguments = [
            (index, spec) for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)
        ]
        self._static = not program.dimensions and all(
            isinstance(size, int) for _, spec in self._arguments for size in spec.meta.shape
        )
        self._has_sizes = any(isinstance(spec, SizeInput) for spec in program.inputs)

    def _device_type(self, captured: str) -> str:
        return captured if self._device is None else self._device.type

    @cached_property
    def _fast(self) -> tuple[tuple[type, ...], Any, list[tuple[int, torch.dtype, tuple[Size, ...], str]]]:
        # Imports torch, which calls with arrays do without.
        import torch

        from aotexport_runtime.values import dtypes

        expected = [
            (index, dtypes.dtype(spec.meta.dtype), tuple(spec.meta.shape), self._device_type(spec.meta.device))
            for index, spec in self._arguments
        ]
        return (torch.Tensor, torch.nn.Parameter), torch.strided, expected

    def check(self, leaves: list[Any]) -> tuple[dict[str, int], list[str]]:
        """Check the tensors of a call.

        Args:
            leaves: one entry per program input; entries of state are ignored.

        Returns:
            The value of each symbol, and one sentence per violation.
        """
        if self._static and not self._has_sizes and not self._program.fixed and self._fits(leaves):
            return {}, []
        violations: list[str] = []
        ranks_fit = self._check_metadata(leaves, violations)
        if not ranks_fit:
            return {}, violations
        symbols = self._bind_symbols(leaves, violations)
        if len(symbols) == len(self._program.dimensions):
            self._check_guards(symbols, violations)
            self._check_sizes(leaves, symbols, violations)
            self._check_fixed(leaves, symbols, violations)
        return symbols, violations

    def _fits(self, leaves: list[Any]) -> bool:
        """Return whether every tensor has its static metadata; the fast way to say yes."""
        if self._forms or Array in map(type, leaves):
            return False
        types, strided, expected = self._fast
        for index, dtype, shape, device_type in expected:
            leaf = leaves[index]
            if (
                type(leaf) not in types
                or leaf.dtype is not dtype
                or leaf.shape != shape
                or leaf.device.type != device_type
                or leaf.layout is not strided
            ):
                return False
        return True

    def _check_metadata(self, leaves: list[Any], violations: list[str]) -> bool:
        ok = True
        for index, spec in self._arguments:
            leaf, meta, path = leaves[index], spec.meta, spec.path
            if not is_tensor(leaf):
                violations.append(f"`{path}`: expected a tensor {meta.dtype}, got {type(leaf).__name__}")
                ok = False
                continue
            reason = self._structure(leaf, spec, self._forms.get(index))
            if reason is not None:
                violations.append(f"`{path}`: {reason}")
                ok = False
                continue
            if _name(leaf.dtype) != meta.dtype:
                violations.append(f"`{path}`: expected dtype {meta.dtype}, got {_name(leaf.dtype)}")
            if leaf.device.type != self._device_type(meta.device):
                expected = self._device_type(meta.device)
                violations.append(f"`{path}`: expected a tensor on {expected}, got one on {leaf.device}")
            if _name(leaf.layout) != "strided":
                violations.append(f"`{path}`: expected layout strided, got {_name(leaf.layout)}")
                ok = False
            elif leaf.dim() != len(meta.shape):
                expected = self._shape(meta.shape)
                violations.append(f"`{path}`: expected shape {expected}, got {list(leaf.shape)}")
                ok = False
        for index, spec in enumerate(self._program.inputs):
            if isinstance(spec, SizeInput) and type(leaves[index]) is not int:
                violations.append(f"`{spec.path}`: expected an int, got {type(leaves[index]).__name__}")
                ok = False
        return ok

    def _check_identity(self, leaves: list[Any], violations: list[str]) -> None:
        seen: dict[int, str] = {}
        for index, spec in self._arguments:
            first = seen.setdefault(id(leaves[index]), spec.path)
            if first != spec.path:
                violations.append(
                    f"`{spec.path}`: expected another tensor than `{first}`, as at capture, since the model takes "
                    "gradients with regard to its arguments, or asks whether they are one object; got the same"
                )

    def _structure(self, leaf: torch.Tensor, spec: ArgumentInput, form: Form | None) -> str | None:
        """Return how a tensor differs in what it is made of."""
        if form is None:
            return (
                f"expected a plain tensor, as at capture, got a `{type(leaf).__name__}`" if is_wrapper(leaf) else None
            )
        reason = form.why_not(leaf)
        if reason is not None:
            return reason
        for part, meta in zip(parts(leaf), spec.parts, strict=True):
            if _name(part.dtype) != meta.dtype or part.dim() != len(meta.shape):
                return f"expected to be made of {meta.dtype}{self._shape(meta.shape)}, got {_described(part)}"
            if any(isinstance(size, int) and n != size for n, size in zip(part.shape, meta.shape, strict=True)):
                return f"expected to be made of {meta.dtype}{self._shape(meta.shape)}, got {_described(part)}"
        return None

    def _check_fixed(self, leaves: list[Any], symbols: Mapping[str, int], violations: list[str]) -> None:
        """Check what the captured Python code read off its tensors."""
        if "identity" in self._program.fixed:
            self._check_identity(leaves, violations)
        for index, spec in self._arguments if self._program.fixed else ():
            leaf, meta = leaves[index], spec.meta
            if "layout" in self._program.fixed:
                expected = tuple(_value(step, symbols) for step in meta.stride)
                offset = _value(meta.offset, symbols)
                if not _same_layout(leaf.shape, leaf.stride(), expected) or leaf.storage_offset() != offset:
                    violations.append(
                        f"`{spec.path}`: expected strides {expected} and storage offset {offset}, as at capture, since "
                        f"the model's code reads the layout of tensors; got {leaf.stride()} and {leaf.storage_offset()}"
                    )
            if "requires_grad" in self._program.fixed and leaf.requires_grad != meta.requires_grad:
                violations.append(
                    f"`{spec.path}`: expected requires_grad={meta.requires_grad}, as at capture, since the model's "
                    f"code reads it; got {leaf.requires_grad}"
                )

    def _bind_symbols(self, leaves: list[Any], violations: list[str]) -> dict[str, int]:
        """Return the value of each symbol that has one."""
        symbols: dict[str, int] = {}
        for dimension in self._program.dimensions:
            size, where = self._read(dimension, leaves)
            if is_tensor(size):
                raise NotSupported(
                    "torch.jit.trace would hold the sizes of this call for the only ones, and the program has dynamic "
                    "ones. Save the bundle itself, or export with fixed sizes"
                )
            value, remainder = divmod(size - dimension.offset, dimension.factor)
            if remainder:
                violations.append(
                    f"{where} is {size}; expected {dimension.factor} * {dimension.name} + {dimension.offset}"
                )
                continue
            low, high = dimension.min, dimension.max
            if (low is not None and value < low) or (high is not None and value > high):
                violations.append(f"{where}: `{dimension.name}` is {value}, outside {sizes.describe_range(low, high)}")
            symbols[dimension.symbol] = value
        return symbols

    def _check_guards(self, symbols: Mapping[str, int], violations: list[str]) -> None:
        for guard in self._program.guards:
            if not _value(guard, symbols):
                values = ", ".join(
                    f"{self._names[symbol]}={symbols[symbol]}" for symbol in sorted(sizes.symbols_of(guard))
                )
                violations.append(f"the program holds only where {sizes.describe(guard, self._names)}; here {values}")

    def _read(self, dimension: Dimension, leaves: list[Any]) -> tuple[int, str]:
        spec = self._program.inputs[dimension.input_index]
        leaf = leaves[dimension.input_index]
        if isinstance(spec, SizeInput):
            return leaf, f"`{spec.path}`"
        path = spec.path if isinstance(spec, ArgumentInput) else spec.name
        return leaf.shape[dimension.axis], f"`{path}`: size {dimension.axis}"

    def _check_sizes(self, leaves: list[Any], symbols: Mapping[str, int], violations: list[str]) -> None:
        for index, spec in self._arguments:
            actual = leaves[index].shape
            for axis, expected in enumerate(spec.meta.shape):
                wanted = _value(expected, symbols)
                if actual[axis] != wanted:
                    shape = self._shape(spec.meta.shape)
                    name = "" if isinstance(expected, int) else f" ({sizes.describe(expected, self._names)} = {wanted})"
                    violations.append(f"`{spec.path}`: expected shape {shape}, got {list(actual)} at axis {axis}{name}")
                    break
        for index, spec in enumerate(self._program.inputs):
            if isinstance(spec, SizeInput) and leaves[index] != symbols[spec.symbol]:
                violations.append(f"`{spec.path}`: expected {symbols[spec.symbol]}, got {leaves[index]}")

    def _shape(self, shape: tuple[Any, ...]) -> str:
        return "[" + ", ".join(sizes.describe(size, self._names) for size in shape) + "]"


def _described(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)}{list(tensor.shape)}"


class SoftGuards:
    """The guards of one functional graph; a call that fails them runs the forward graph.

    Attributes:
        strides: index of each tensor input, its strides, and whether they are integers.
        sizes: symbols of sizes, which must not be 0.
        guards: truths over the symbols.
        lazy: inputs that must be neither conjugated nor negated views.
        records_gradients: whether it is a joint graph; what follows is only checked of such.
        without_grad: inputs that must not require grad.
        with_grad: inputs of which one must require grad: no gradient of the graph's results flows to the others.
        leaf_mutations: inputs that it changes, each with whether it must be a leaf.
        without_hooks: inputs whose hooks would be called, with None, by passes whose gradient does not come to them.
        offsets: inputs that must begin at an offset of their storage.
        needs_alias_check: whether `mutation_is_shared` must be asked.
    """

    def __init__(self, program: Program, functional: FunctionalGraph, graph: Graph) -> None:
        """Prepare the guards of `functional`, the calling convention of `graph`, for `program`."""
        self.strides: list[tuple[int, tuple[Any, ...], bool]] = [
            (index, spec.meta.stride, all(isinstance(step, int) for step in spec.meta.stride))
            for index, spec in enumerate(program.inputs)
            if isinstance(spec, ArgumentInput | StateInput)
        ]
        self.without_grad = [
            index
            for index, spec in enumerate(program.inputs)
            if not isinstance(spec, SizeInput) and not spec.meta.requires_grad
        ]
        detached = functional.gradients.detached_inputs if functional.gradients is not None else ()
        self.with_grad = [index for index, _, _ in self.strides if index not in detached]
        self.lazy = [
            index
            for index, spec in enumerate(program.inputs)
            if isinstance(spec, ArgumentInput) and spec.meta.dtype.startswith(("complex", "float", "bfloat"))
        ]
        integers = {spec.symbol for spec in program.inputs if isinstance(spec, SizeInput)}
        self.sizes = [dimension.symbol for dimension in program.dimensions if dimension.symbol not in integers]
        self.guards = functional.guards
        self.records_gradients = functional.gradients is not None
        mutated = {mutation.input_index for mutation in functional.mutations}
        arguments = [index for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)]
        self._tensors = [index for index, spec in enumerate(program.inputs) if not isinstance(spec, SizeInput)]
        self._mutated = mutated
        self.without_hooks = reached_in_part(graph, functional)
        self.offsets = _offsets(program, functional, graph)
        self.needs_alias_check = bool(arguments) and bool(mutated)
        self.leaf_mutations = [
            (mutation.input_index, mutation.is_leaf)
            for mutation in functional.mutations
            if isinstance(program.inputs[mutation.input_index], ArgumentInput) and mutation.requires_grad
        ]

    def check(self, inputs: list[Any], symbols: Mapping[str, int]) -> str | None:
        """Return why the functional graph does not fit the call, or None when it does.

        Args:
            inputs: tensors and sizes, one per program input.
            symbols: value per symbol.
        """
        if any(symbols[symbol] == 0 for symbol in self.sizes):
            return "a size is 0, and kernels of functional graphs do not all bear that"
        for guard in self.guards:
            if not _value(guard, symbols):
                return f"the graph assumes {sizes.describe(guard)}"
        for index, stride, static in self.strides:
            tensor = inputs[index]
            actual = tensor.stride()
            if actual != stride:
                expected = stride if static else tuple(_value(step, symbols) for step in stride)
                if actual != expected and not _same_layout(tensor.shape, actual, expected):
                    return f"input {index} has strides {actual}, captured with {expected}"
        for index in self.lazy:
            if inputs[index].is_conj() or inputs[index].is_neg():
                return f"input {index} is a conjugated or negated view"
        if self.records_gradients:
            for index in self.without_grad:
                if inputs[index].requires_grad:
                    return f"input {index} requires grad, and did not at capture"
            if not any(inputs[index].requires_grad for index in self.with_grad):
                return "only inputs that get no gradient require grad"
            for index in self.without_hooks:
                if inputs[index]._backward_hooks:
                    return f"input {index} has hooks, and some outputs have no gradient with regard to it"
            for index, is_leaf in self.leaf_mutations:
                if inputs[index].is_leaf != is_leaf:
                    return f"mutated input {index} is {'no' if is_leaf else 'a'} leaf, unlike at capture"
        for index, offset in self.offsets:
            if inputs[index].storage_offset() != sizes.evaluate(offset, symbols):
                return f"input {index} does not begin where it did in its storage at capture"
        if self.needs_alias_check and self.mutation_is_shared(inputs):
            return "a mutated input shares memory with another input"
        return None

    def mutation_is_shared(self, inputs: list[Any]) -> bool:
        """Return whether an input that the graph changes shares memory with another.

        Storages may overlap without being one: those of two views of a NumPy array.
        """
        spans: list[tuple[int, int, bool]] = []
        for index in self._tensors:
            storage = inputs[index].untyped_storage()
            if pointer := storage.data_ptr():
                spans.append((pointer, pointer + storage.nbytes(), index in self._mutated))
        spans.sort()
        end, mutated = 0, False
        for low, high, is_mutated in spans:
            if low < end and (mutated or is_mutated):
                return True
            mutated = is_mutated
            end = max(end, high)
        return False


def _name(value: Any) -> str:
    """Return the format's name of a dtype or layout (`torch.float32`: `float32`)."""
    return str(value).removeprefix("torch.")


def _value(size: Size, symbols: Mapping[str, int]) -> int | None:
    """Return the value of `size`; None: it has none for these symbols (it divides by zero), and nothing equals it."""
    try:
        return sizes.evaluate(size, symbols)
    except sizes.UNDEFINED:
        return None


def _offsets(program: Program, functional: FunctionalGraph, graph: Graph) -> list[tuple[int, Size]]:
    """Return the inputs whose storage offset matters, with the offset at capture.

    A view without recorded steps is made by `as_strided` with the offset that it has in the graph. Where the graph
    writes to the base, that offset is into a new tensor, and is the caller's only if the base begins where it did;
    likewise where it changes its metadata as well. An `as_strided` in the graph counts from the caller's storage.
    """
    if any(node.op.startswith("aten::as_strided") for node in graph.nodes):
        matter = set(range(len(program.inputs)))
    else:
        written = {mutation.input_index for mutation in functional.mutations if mutation.data}
        viewed = {o.input_index for o in functional.outputs if isinstance(o, InputAlias) and o.steps is None}
        moved = {mutation.input_index for mutation in functional.mutations if mutation.data and mutation.metadata}
        matter = (written & viewed) | moved
    specs = [(index, program.inputs[index]) for index in sorted(matter)]
    return [(index, spec.meta.offset) for index, spec in specs if not isinstance(spec, SizeInput)]


def _same_layout(shape: torch.Size, actual: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether two strides address the same elements: they may differ where there is at most one."""
    return 0 in shape or all(size <= 1 or a == b for size, a, b in zip(shape, actual, expected, strict=True))
