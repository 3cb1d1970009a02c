"""What a program looks like from outside: its inputs and outputs by name. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from functools import reduce
from typing import Any

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.rows.analysis import row_axes
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.schema.trees import Constant, Instance, Leaf, Mapping, Sequence, Tree
from aotexport_runtime.schema.values import StringArgument, TensorMeta
from aotexport_runtime.values.sizes import symbols_of
from aotexport_runtime.values.trees import keys_of

RESULT = "output"
"""Name of a result that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output.

    Attributes:
        name: steps from the parameter, or from the result, joined by dots: `x`, `batch.ids.0`, `logits`. What a result
            without names of its own holds begins with `output`.
        dtype: element type, by the format's name; `int64` of a Python integer.
        shape: size per axis, -1 where it differs between calls; empty for a Python integer.
        index: into `Program.inputs` or `Program.outputs`.
        is_number: whether it is a Python integer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    index: int
    is_number: bool = False


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """A string of the signature, which was fixed at export; a call may name it, and chooses by it among variants.

    Attributes:
        name: as that of a `TensorSpec`.
        values: of the program and its variants, each once; the first is that of calls which do not name it.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """An axis that may be padded: a dynamic size that stands at most once in each input and output.

    Attributes:
        name: the user's name of the size.
        inputs: axis per input; None: it has none.
        outputs: axis per output; None: it has none.
        least: least length of a call.
        masks: indices of inputs that say where padding is: a call with a 0 at its first step is not padded.
    """

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    least: int = 1
    masks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchAxes:
    """An axis of every input and output along which calls may be joined.

    Attributes:
        name: the user's name of its size.
        least: least size of a call.
        most: greatest size of a call, joined ones too; None: unbounded.
        inputs: axis per input.
        outputs: axis per output.
        padded: along which shorter calls are padded to join longer ones; None: calls of one batch are as long.
    """

    name: str
    least: int
    most: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    padded: Lengths | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """The named inputs and outputs of a program.

    Attributes:
        inputs: in the order of `Program.inputs`.
        outputs: in the order of the result's leaves.
        batches: axes along which calls may be joined as far as sizes tell, the likeliest first.
        lengths: axes that may be padded as far as sizes tell.
        texts: strings that the program and all of its variants have.
        choices: the values of `texts` in the program and each variant.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batches: tuple[BatchAxes, ...] = ()
    lengths: tuple[Lengths, ...] = ()
    texts: tuple[TextSpec, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ()

    def choice(self, given: MappingOf[str, str], violations: list[str]) -> int:
        """Return the first program whose strings a call names, those of the first program by default; report others."""
        for text in self.texts:
            if given.get(text.name, text.values[0]) not in text.values:
                known = " or ".join(map(repr, text.values))
                violations.append(f"`{text.name}`: expected {known}, as at capture, got {given[text.name]!r:.100}")
        wanted = tuple(given.get(text.name, text.values[0]) for text in self.texts)
        if wanted in self.choices:
            return self.choices.index(wanted)
        if not violations:
            named = ", ".join(f"`{text.name}` is {value!r}" for text, value in zip(self.texts, wanted, strict=True))
            violations.append(f"no program was captured where {named}")
        return 0


def is_rare(dtype: str) -> bool:
    """Return whether numpy lacks a dtype, all of whose values float32 has: bfloat16 and float8."""
    return dtype == "bfloat16" or dtype.startswith("float8")


def join_key(inputs: Iterable[TensorSpec], axes: BatchAxes, values: list[Any]) -> tuple[Hashable, int, int] | None:
    """Return what calls of one batch share, the size of the batch, and the length that is padded, 1 where none is.

    Lengths are alike up to the next power of two: half of a batch at most is padding. None: the call does not fit by
    itself.
    """
    kinds: list[Any] = []
    sizes, lengths = set[int](), set[int]()
    padded = axes.padded.inputs if axes.padded else [None] * len(axes.inputs)
    for spec, axis, long, value in zip(inputs, axes.inputs, padded, values, strict=True):
        shape = [*value.shape]
        fits = len(shape) == len(spec.shape) and all(
            want in (-1, size) for want, size in zip(spec.shape, shape, strict=True)
        )
        if not fits or str(value.dtype).removeprefix("torch.") != spec.dtype:
            return None
        sizes.add(shape[axis])
        if long is not None:
            lengths.add(shape[long])
            shape[long] = 1 << (shape[long] - 1).bit_length()
        kinds.append((type(value), str(getattr(value, "device", "")), *shape[:axis], *shape[axis + 1 :]))
    if len(sizes) != 1 or len(lengths) > 1 or 0 in lengths or not axes.least <= min(sizes):
        return None
    for index in axes.padded.masks if axes.padded else ():
        if not values[index][(slice(None),) * padded[index] + (0,)].all():
            return None
    return tuple(kinds), min(sizes), max(lengths, default=1)


def served(programs: Iterable[Program]) -> list[Program]:
    """Return a program and its variants that clients call: those of the fewest inputs, without labels for instance."""
    programs = [*programs]
    counts = [len(_inputs(program)) for program in programs]
    return [program for program, count in zip(programs, counts, strict=True) if count == min(counts)]


def interface_of(programs: Iterable[Program]) -> Interface:
    """Return the inputs and outputs of a program and its variants.

    Sizes in which these differ are -1, and calls are joined along axes that all of them have.

    Raises:
        NotSupported: an input cannot come from a client, or two have one name.
    """
    programs = [*programs]
    found = reduce(_merged, map(_interface, programs))
    strings = [_strings(program) for program in programs]
    names = [name for name in strings[0] if all(name in each for each in strings)]
    _check_names([spec.name for spec in found.inputs] + names)
    texts = [TextSpec(name=name, values=tuple(dict.fromkeys(each[name] for each in strings))) for name in names]
    choices = tuple(tuple(each[name] for name in names) for each in strings)
    return dataclasses.replace(found, texts=tuple(texts), choices=choices)


def _strings(program: Program) -> dict[str, str]:
    """Return the strings of the signature by name."""
    return {
        name: leaf.value.value
        for parameter in program.parameters
        for name, leaf in _named(parameter.tree, parameter.name)
        if isinstance(leaf, Constant) and isinstance(leaf.value, StringArgument)
    }


def _interface(program: Program) -> Interface:
    inputs = _inputs(program)
    outputs = [_spec(name, leaf.index, program.outputs[leaf.index]) for name, leaf in named_leaves(program.output_tree)]
    _check_names([spec.name for spec in inputs])
    _check_names([spec.name for spec in outputs])
    batches = tuple(
        BatchAxes(
            name=axes.dimension.name,
            least=axes.dimension.min or 0,
            most=axes.dimension.max,
            inputs=tuple(axes.inputs[spec.index] for spec in inputs),
            outputs=tuple(axes.outputs[spec.index] for spec in outputs),
        )
        for axes in row_axes(program)
    )
    lengths = tuple(_lengths(program, inputs, outputs))
    return Interface(inputs=tuple(inputs), outputs=tuple(outputs), batches=batches, lengths=lengths)


def _lengths(program: Program, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> Iterator[Lengths]:
    given = [spec.meta if isinstance(spec, ArgumentInput) else None for spec in program.inputs]
    taken, made = [given[spec.index] for spec in inputs], [program.outputs[spec.index] for spec in outputs]
    for dimension in program.dimensions:
        axes = [_axes_of(dimension.symbol, meta) for meta in (*taken, *made)]
        if all(len(each) <= 1 for each in axes) and any(axes[: len(inputs)]):
            found = [each[0] if each else None for each in axes]
            yield Lengths(
                name=dimension.name,
                inputs=tuple(found[: len(inputs)]),
                outputs=tuple(found[len(inputs) :]),
                least=max(dimension.min or 0, 1),
            )


def _axes_of(symbol: str, meta: TensorMeta | None) -> list[int]:
    """Return the axes whose size is a symbol; those whose size depends on it count twice."""
    shape = meta.shape if meta else ()
    return [axis for axis, size in enumerate(shape) if symbol in symbols_of(size) for _ in range(1 + (size != symbol))]


def _inputs(program: Program) -> list[TensorSpec]:
    """Return one input per argument of the program; an argument in two places has the name of the first."""
    names: dict[int, str] = {}
    for parameter in program.parameters:
        for name, leaf in named_leaves(parameter.tree, parameter.name):
            names.setdefault(leaf.index, name)
    found: list[TensorSpec] = []
    for index, spec in enumerate(program.inputs):
        if isinstance(spec, StateInput):
            continue
        name = names[index]
        if isinstance(spec, ArgumentInput) and spec.subclass is not None:
            raise NotSupported(f"input `{name}` is a `{spec.subclass.type}`, and clients send plain tensors")
        found.append(_spec(name, index, spec.meta if isinstance(spec, ArgumentInput) else None))
    return found


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Leaf]]:
    """Return every leaf of the tree of the parameter `name`, or of a result, with its dotted name, in order."""
    return ((found, leaf) for found, leaf in _named(tree, name) if isinstance(leaf, Leaf))


def _named(tree: Tree, name: str) -> Iterator[tuple[str, Leaf | Constant]]:
    """Yield every leaf and constant of `tree` with its dotted name, in order."""
    if isinstance(tree, Leaf | Constant):
        yield name or RESULT, tree
        return
    if isinstance(tree, Sequence):
        steps: list[Any] = [*range(len(tree.items))]
    else:
        steps = [*(keys_of(tree) if isinstance(tree, Mapping) else tree.fields)]
    named = not isinstance(tree, Sequence | Instance) and all(isinstance(step, str) and step for step in steps)
    prefix = f"{name}." if name else "" if named else f"{RESULT}."
    for step, item in zip(steps, tree.items, strict=True):
        yield from _named(item, f"{prefix}{step}")


def _spec(name: str, index: int, meta: TensorMeta | None) -> TensorSpec:
    if meta is None:
        return TensorSpec(name=name, dtype="int64", shape=(), index=index, is_number=True)
    shape = tuple(size if isinstance(size, int) else -1 for size in meta.shape)
    return TensorSpec(name=name, dtype=meta.dtype, shape=shape, index=index)


def _check_names(names: list[str]) -> None:
    for twice in {name for name in names if names.count(name) > 1}:
        raise NotSupported(
            f"two inputs or outputs are named `{twice}`, with steps joined by dots. Rename a key, and export again"
        )


def _merged(one: Interface, other: Interface) -> Interface:
    inputs = {spec.name: spec for spec in other.inputs}
    outputs = {spec.name: spec for spec in other.outputs}
    if [*inputs] != [spec.name for spec in one.inputs] or [*outputs] != [spec.name for spec in one.outputs]:
        raise NotSupported("the variants of the program differ in the names of their inputs or outputs")
    return Interface(
        inputs=tuple(_merged_spec(spec, inputs[spec.name]) for spec in one.inputs),
        outputs=tuple(_merged_spec(spec, outputs[spec.name]) for spec in one.outputs),
        batches=tuple(axes for axes in one.batches if axes in other.batches),
        lengths=tuple(axes for axes in one.lengths if axes in other.lengths),
    )


def _merged_spec(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        raise NotSupported(f"the variants of the program differ in the dtype or the axes of `{one.name}`")
    return dataclasses.replace(
        one, shape=tuple(a if a == b else -1 for a, b in zip(one.shape, other.shape, strict=True))
    )
