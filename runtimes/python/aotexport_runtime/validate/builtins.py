"""Rules of calls that are no operators of torch: arithmetic of Python numbers, and regions of interpreter state.

Numbers have bounded size: `2 ** (10 ** 9)` and `[0] * (10 ** 10)` are short to write and exhaust memory. The types of
results are inferred; numbers from elsewhere are what metadata says, and have at most 64 bits: `execution/checks.py`
sees to that when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotexport_runtime.allowed.operators import EFFECT_OPERANDS, FLOAT_FUNCTIONS, OPERANDS
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.subclasses import Subclass
from aotexport_runtime.schema.values import (
    Argument,
    DeviceArgument,
    DTypeArgument,
    FloatArgument,
    NothingMeta,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    StringArgument,
    SubgraphArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.validate.bodies import described
from aotexport_runtime.validate.subclasses import count_parts, is_placement
from aotexport_runtime.values.meshes import DTENSOR
from aotexport_runtime.values.sizes import MAX_EXPONENT

Values = Mapping[str, ValueMeta]

_NUMBER_NBITS = 64
_TO_FLOAT = frozenset(("python::truediv", "python::sym_float", *(f"python::{name}" for name in FLOAT_FUNCTIONS)))
_TO_INTEGER = frozenset(
    f"python::{name}"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "xor", "lshift", "rshift"),
        *("sym_int", "floor", "ceil", "round"),
    )
)
_ONE_OF_THEM = frozenset(("python::sym_max", "python::sym_min", "python::sym_ite"))


class Builtins:
    """The builtin calls of one graph, in order."""

    def __init__(
        self,
        values: Values,
        subclasses: Sequence[Subclass] = (),
        limits: Limits = DEFAULT,
    ) -> None:
        """Check calls that refer to `values`, which grows as the graph defines them, and to its `subclasses`."""
        self._most_nbits = limits.number_nbits
        self._are_floats: dict[str, bool] = {}
        self._values = values
        self._subclasses = subclasses
        self._where = Place("")
        self._nbits: dict[str, int] = {}
        self._regions: list[tuple[Node, Place]] = []

    def check(self, node: Node, where: Place) -> None:
        """Refuse a call with operands that it does not take.

        Args:
            node: any call but one of `aten`; custom operators pass.
            where: of the node, for errors.
        """
        self._where = where
        kinds = OPERANDS.get(node.op)
        if kinds is None:
            return
        if len(node.args) != len(kinds) or node.kwargs:
            raise self._invalid(
                node,
                f"takes {len(kinds)} operands, got {len(node.args) + len(node.kwargs)}",
                "operator-arguments/operands",
            )
        for index, (kind, operand) in enumerate(zip(kinds, node.args, strict=True)):
            if not _TAKES[kind](operand, self._values):
                raise where.at("args", index).invalid(
                    f"builtin `{node.op}` takes {kind} as operand {index}", "operator-arguments/operand"
                )
        if node.op == "python::getitem":
            self._check_item(node)
        elif node.op.startswith("python::"):
            self._check_arithmetic(node)
        elif node.op == "higher_order::autograd_function":
            self._check_function(node)
        elif node.op in ("subclass::wrap", "distributed::from_local"):
            self._check_structure(node)
        elif node.op in EFFECT_OPERANDS:
            self._check_effect(node)

    def check_closed(self) -> None:
        """Refuse a region that the graph leaves open."""
        if self._regions:
            raise BundleInvalid("a region is not left", where=self._regions[-1][1], check="region-open/region")

    def _invalid(self, node: Node, reason: str, check: str) -> BundleInvalid:
        return self._where.invalid(f"builtin `{node.op}` {reason}", check)

    def _wrong_result(self, node: Node, given: str) -> BundleInvalid:
        return (
            Place(self._where)
            .at("meta")
            .invalid(
                f"builtin `{node.op}` gives {given}, and the graph says {described(node.meta)}", "result-type/builtin"
            )
        )

    def _check_structure(self, node: Node) -> None:
        first, index, *_ = node.args
        if not (isinstance(index, int) and index < len(self._subclasses)):
            raise self._invalid(node, "takes no structure that the graph has", "operator-arguments/structure")
        structure = self._subclasses[index]
        if node.op == "distributed::from_local":
            if structure.type != DTENSOR:
                raise self._invalid(
                    node, "takes the structure of a distributed tensor", "operator-arguments/distributed"
                )
        elif isinstance(first, list) and len(first) != count_parts(structure):
            raise self._invalid(
                node, f"takes {count_parts(structure)} tensors, got {len(first)}", "operator-arguments/parts"
            )

    def _check_function(self, node: Node) -> None:
        _, backwards, operands, _, outputs, _, dirty, nondifferentiable, materializes, _ = node.args
        assert isinstance(outputs, int)
        for indices, count in ((dirty, len(_items(operands))), (nondifferentiable, outputs)):
            if any(isinstance(index, int) and index >= count for index in _items(indices)):
                raise self._invalid(
                    node, "takes indices of its operands and outputs", "operator-arguments/function-index"
                )
        expected = 1 if materializes else 1 << min(outputs - len(_items(nondifferentiable)), 16)
        found = len(_items(backwards))
        if found != expected:
            raise self._invalid(
                node, f"takes {expected} subgraphs of its backward, got {found}", "operator-arguments/function-backward"
            )

    def _check_item(self, node: Node) -> None:
        container, index = node.args
        assert isinstance(container, str)
        meta = self._values[container]
        assert isinstance(meta, SequenceMeta)
        if isinstance(index, SliceArgument):
            self._check_slice(node, index)
        elif isinstance(index, int) and not -len(meta.items) <= index < len(meta.items):
            raise self._invalid(
                node, f"takes item {index} of a sequence of {len(meta.items)}", "operator-arguments/item"
            )
        item = meta.items[index] if isinstance(index, int) else meta
        if not isinstance(node.meta, NothingMeta) and described(node.meta) != described(item):
            raise self._wrong_result(node, described(item))

    def _check_slice(self, node: Node, index: SliceArgument) -> None:
        for part in (index.start, index.stop, index.step):
            if isinstance(part, str) and described(self._values.get(part)) != "an integer":
                raise self._invalid(node, "takes items by what is no integer", "operator-arguments/slice")
        if index.step == 0:
            raise self._invalid(node, "takes items by a step of 0", "operator-arguments/slice-step")

    def _check_arithmetic(self, node: Node) -> None:
        operands = node.args[0] if isinstance(node.args[0], list) else node.args
        nbits = [self._number_nbits(operand) for operand in operands]
        if node.op == "python::pow" and not self._is_float(operands[0]):
            nbits = [nbits[0] * self._exponent(node)]
        if node.op == "python::lshift":
            nbits = [nbits[0] + self._shift(node)]
        total = sum(nbits) if node.op == "python::mul" else max(nbits, default=0) + len(nbits).bit_length()
        if total > self._most_nbits:
            raise self._invalid(
                node, f"may give numbers of more than {self._most_nbits} bits", "operator-arguments/bits"
            )
        self._nbits[node.name] = total
        self._are_floats[node.name] = gives_float = self._gives_float(node.op, operands)
        depends = node.op == "python::pow" or (node.op in _ONE_OF_THEM and not gives_float)
        kinds = ("a float", "an integer") if depends else ("a float",) if gives_float else ("an integer",)
        if described(node.meta) not in kinds:
            raise self._wrong_result(node, " or ".join(kinds))

    def _gives_float(self, op: str, operands: Sequence[Argument]) -> bool:
        """Return whether the result is a float; where that depends on values, False, which has the stricter rules."""
        if op in _TO_FLOAT:
            return True
        if op in _TO_INTEGER:
            return False
        are_floats = map(self._is_float, operands[1:] if op == "python::sym_ite" else operands)
        return all(are_floats) if op in _ONE_OF_THEM else any(are_floats)

    def _exponent(self, node: Node) -> int:
        exponent = node.args[1]
        if isinstance(exponent, int) and abs(exponent) <= MAX_EXPONENT:
            return abs(exponent)
        if self._is_float(exponent):
            return 1
        raise self._invalid(
            node,
            f"raises an integer to a power that is no integer from -{MAX_EXPONENT} to {MAX_EXPONENT}",
            "operator-arguments/exponent",
        )

    def _shift(self, node: Node) -> int:
        distance = node.args[1]
        if isinstance(distance, int) and 0 <= distance <= MAX_EXPONENT:
            return distance
        raise self._invalid(node, f"shifts by what is no integer from 0 to {MAX_EXPONENT}", "operator-arguments/shift")

    def _is_float(self, operand: Argument) -> bool:
        if not isinstance(operand, str):
            return isinstance(operand, float | FloatArgument)
        meta = self._values.get(operand)
        return self._are_floats.get(operand, isinstance(meta, ScalarMeta) and meta.type == "float")

    def _number_nbits(self, operand: Argument) -> int:
        """Return the most bits that a number may have."""
        if isinstance(operand, int):
            return operand.bit_length()
        return self._nbits.get(operand, _NUMBER_NBITS) if isinstance(operand, str) else _NUMBER_NBITS

    def _check_effect(self, node: Node) -> None:
        if node.op == "torch::enter_checkpoint" and any(region.op == node.op for region, _ in self._regions):
            raise self._invalid(node, "begins within another", "operator-arguments/checkpoint")
        if node.op.startswith("torch::enter"):
            self._regions.append((node, self._where))
        elif node.op.startswith("torch::exit"):
            begun = self._regions.pop()[0] if self._regions else None
            if begun is None or (begun.name, begun.op) != (node.args[0], node.op.replace("exit", "enter")):
                message = f"builtin `{node.op}` leaves a region that is not the innermost one"
                raise self._where.invalid(message, "region-open/region")
        given = "an integer" if node.op == "torch::is_grad_enabled" else "nothing"
        if described(node.meta) != given:
            raise self._wrong_result(node, given)


def _refers(*kinds: type[ValueMeta]) -> Callable[[Argument, Values], bool]:
    """Return whether an operand is a value with metadata of some kinds."""
    return lambda operand, values: isinstance(operand, str) and isinstance(values.get(operand), kinds)


def _is(*kinds: type[Any]) -> Callable[[Argument, Values], bool]:
    """Return whether an operand is a constant of some kinds; a truth value is no integer."""
    return lambda operand, values: type(operand) in kinds


def _array_of(takes: Callable[[Argument, Values], bool]) -> Callable[[Argument, Values], bool]:
    return lambda operand, values: isinstance(operand, list) and all(takes(item, values) for item in operand)


def _is_number(operand: Argument, values: Values) -> bool:
    return isinstance(operand, int | float | SizeArgument | FloatArgument) or _COMPUTED(operand, values)


def _is_count(operand: Argument, values: Values) -> bool:
    return type(operand) is int and operand >= 0


def _are_indices(operand: Argument, values: Values) -> bool:
    return _array_of(_is_count)(operand, values) and len(set(map(repr, _items(operand)))) == len(_items(operand))


def _are_placements(operand: Argument, values: Values) -> bool:
    return isinstance(operand, list) and all(map(is_placement, operand))


def _items(operand: Argument) -> list[Argument]:
    assert isinstance(operand, list)
    return [*operand]


_COMPUTED = _refers(SizeMeta, ScalarMeta)
_TENSOR = _refers(TensorMeta)
_NONE = type(None)
_TAKES: dict[str, Callable[[Argument, Values], bool]] = {
    "a number": _is_number,
    "an array of numbers": _array_of(_is_number),
    "a tensor": _TENSOR,
    "an array of tensors": _array_of(_TENSOR),
    "a sequence": _refers(SequenceMeta),
    "an integer or a slice": _is(int, SliceArgument),
    "a body": _is(SubgraphArgument),
    "an array of bodies and null": _array_of(_is(SubgraphArgument, _NONE)),
    "an array": _is(list),
    "a count": _is_count,
    "an array of indices": _are_indices,
    "a truth value": _is(bool),
    "a string": _is(StringArgument),
    "a device": _is(DeviceArgument),
    "a dtype or null": _is(DTypeArgument, _NONE),
    "the index of a structure": _is_count,
    "an array of placements": _are_placements,
    "an array of placements or null": lambda operand, values: operand is None or _are_placements(operand, values),
    "a grad mode": lambda operand, values: isinstance(operand, bool) or _COMPUTED(operand, values),
    # These depend on more than the operand.
    "a region": lambda operand, values: True,
    "a predicate": lambda operand, values: True,
}
"""Whether an operand is of a kind."""
