"""Rules of calls that are no operators of torch: arithmetic of Python numbers, and regions of interpreter state.

Numbers have bounded size: `2 ** (10 ** 9)` and `[0] * (10 ** 10)` are short to write and exhaust memory. The types of
results are inferred; numbers from elsewhere are what metadata says, and have at most 64 bits: `execution/numbers.py`
sees to that when the graph runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotexport_runtime.allowed.operators import (
    BODY_OPERANDS,
    DISTRIBUTED_OPERANDS,
    FLOAT_FUNCTIONS,
    LAUNCH_OPERANDS,
    OPERANDS,
    SUBCLASS_OPERANDS,
)
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
from aotexport_runtime.validate.subclasses import count_parts
from aotexport_runtime.values.meshes import DTENSOR
from aotexport_runtime.values.sizes import MAX_EXPONENT

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
        values: Mapping[str, ValueMeta],
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

        Raises:
            BundleInvalid: names the fault.
        """
        self._where = where
        expected = OPERANDS.get(node.op)
        if expected is None:
            return
        if len(node.args) != expected or node.kwargs:
            raise self._invalid(node, f"takes {expected} operands, got {len(node.args) + len(node.kwargs)}")
        if node.op == "python::getitem":
            self._check_item(node)
        elif node.op.startswith("python::"):
            self._check_arithmetic(node)
        elif node.op in BODY_OPERANDS:
            self._check_bodies(node)
        elif node.op in LAUNCH_OPERANDS:
            self._check_launch(node)
        elif node.op in SUBCLASS_OPERANDS:
            self._check_subclass(node)
        elif node.op in DISTRIBUTED_OPERANDS:
            self._check_distributed(node)
        else:
            self._check_effect(node)

    def check_closed(self) -> None:
        """Refuse a region that the graph leaves open.

        Raises:
            BundleInvalid: see above.
        """
        if self._regions:
            raise BundleInvalid("a region is not left", where=self._regions[-1][1], code="region-open")

    def _invalid(self, node: Node, reason: str) -> BundleInvalid:
        return self._where.invalid(f"builtin `{node.op}` {reason}", "operator-arguments")

    def _wrong_result(self, node: Node, given: str) -> BundleInvalid:
        return (
            Place(self._where)
            .at("meta")
            .invalid(f"builtin `{node.op}` gives {given}, and the graph says {described(node.meta)}", "result-type")
        )

    def _check_bodies(self, node: Node) -> None:
        if node.op == "higher_order::autograd_function":
            self._check_function(node)
            return
        if node.op == "higher_order::register_hook":
            self._check_hook(node)
            return
        single = ("higher_order::scan", "higher_order::map_impl", "higher_order::invoke_subgraph")
        count = 1 if node.op in single else 2
        start = 1 if node.op == "higher_order::cond" else 0
        subgraphs = node.args[start : start + count]
        if not all(isinstance(subgraph, SubgraphArgument) for subgraph in subgraphs):
            raise self._invalid(node, "takes subgraphs")
        if not all(isinstance(operands, list) for operands in node.args[start + count :]):
            raise self._invalid(node, "takes lists of operands")

    def _check_launch(self, node: Node) -> None:
        name, operands = node.args
        if not isinstance(name, StringArgument) or not isinstance(operands, list):
            raise self._invalid(node, "takes a name and a list of tensors")
        if not all(map(self._is_tensor, operands)):
            raise self._invalid(node, "takes a name and a list of tensors")

    def _check_subclass(self, node: Node) -> None:
        first, second = node.args
        if node.op == "subclass::inner":
            if not self._is_tensor(first) or not isinstance(second, StringArgument):
                raise self._invalid(node, "takes a tensor and a name")
            return
        count = count_parts(self._structure(node, second))
        if not isinstance(first, list) or not all(map(self._is_tensor, first)):
            raise self._invalid(node, "takes a list of tensors")
        if len(first) != count:
            raise self._invalid(node, f"takes {count} tensors, got {len(first)}")

    def _structure(self, node: Node, index: Argument) -> Subclass:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self._subclasses):
            raise self._invalid(node, "takes no structure that the graph has")
        return self._subclasses[index]

    def _check_distributed(self, node: Node) -> None:
        tensor, *rest = node.args
        if not self._is_tensor(tensor):
            raise self._invalid(node, "takes a tensor")
        if node.op == "distributed::from_local" and self._structure(node, rest.pop(0)).type != DTENSOR:
            raise self._invalid(node, "takes the structure of a distributed tensor")
        placements, *dtypes = rest
        is_optional = node.op != "distributed::redistribute"
        if not _are_strings(placements) and not (placements is None and is_optional):
            raise self._invalid(node, "takes a list of placements")
        if not all(dtype is None or isinstance(dtype, DTypeArgument) for dtype in dtypes):
            raise self._invalid(node, "takes dtypes")

    def _is_tensor(self, operand: Argument) -> bool:
        return isinstance(operand, str) and isinstance(self._values.get(operand), TensorMeta)

    def _check_function(self, node: Node) -> None:
        forward, backwards, operands, additional, outputs, saved, dirty, nondifferentiable, *flags = node.args
        if not isinstance(forward, SubgraphArgument):
            raise self._invalid(node, "takes subgraphs")
        if not (isinstance(backwards, list) and isinstance(operands, list) and isinstance(additional, list)):
            raise self._invalid(node, "takes lists of operands")
        if not all(subgraph is None or isinstance(subgraph, SubgraphArgument) for subgraph in backwards):
            raise self._invalid(node, "takes subgraphs")
        if not (_is_count(outputs) and _is_count(saved) and all(isinstance(flag, bool) for flag in flags)):
            raise self._invalid(node, "takes two counts and two truth values")
        assert isinstance(outputs, int)
        if not (_are_indices(dirty, len(operands)) and _are_indices(nondifferentiable, outputs)):
            raise self._invalid(node, "takes indices of its operands and outputs")
        assert isinstance(nondifferentiable, list)
        expected = 1 if flags[0] else 1 << min(outputs - len(nondifferentiable), 16)
        if len(backwards) != expected:
            raise self._invalid(node, f"takes {expected} subgraphs of its backward, got {len(backwards)}")

    def _check_hook(self, node: Node) -> None:
        subgraph, tensor, additional = node.args
        if not isinstance(subgraph, SubgraphArgument):
            raise self._invalid(node, "takes subgraphs")
        if not self._is_tensor(tensor) or not isinstance(additional, list):
            raise self._invalid(node, "takes a tensor and a list of operands")

    def _check_item(self, node: Node) -> None:
        container, index = node.args
        meta = self._values.get(container) if isinstance(container, str) else None
        if not isinstance(meta, SequenceMeta):
            raise self._invalid(node, "takes an item of what is no sequence")
        if isinstance(index, bool) or not isinstance(index, int | SliceArgument):
            raise self._invalid(node, "takes an item by what is no integer")
        if isinstance(index, SliceArgument):
            self._check_slice(node, index)
        if isinstance(index, int) and not -len(meta.items) <= index < len(meta.items):
            raise self._invalid(node, f"takes item {index} of a sequence of {len(meta.items)}")
        item = meta.items[index] if isinstance(index, int) else meta
        if not isinstance(node.meta, NothingMeta) and described(node.meta) != described(item):
            raise self._wrong_result(node, described(item))

    def _check_slice(self, node: Node, index: SliceArgument) -> None:
        for part in (index.start, index.stop, index.step):
            if isinstance(part, str) and described(self._values.get(part)) != "an integer":
                raise self._invalid(node, "takes items by what is no integer")
        if index.step == 0:
            raise self._invalid(node, "takes items by a step of 0")

    def _check_arithmetic(self, node: Node) -> None:
        operands = node.args[0] if node.op == "python::sym_sum" else node.args
        if not isinstance(operands, list):
            raise self._invalid(node, "takes a list of numbers")
        nbits = [self._number_nbits(operand, node) for operand in operands]
        if node.op == "python::pow" and not self._is_float(operands[0]):
            nbits = [nbits[0] * self._exponent(node)]
        if node.op == "python::lshift":
            nbits = [nbits[0] + self._shift(node)]
        total = sum(nbits) if node.op == "python::mul" else max(nbits, default=0) + len(nbits).bit_length()
        if total > self._most_nbits:
            raise self._invalid(node, f"may give numbers of more than {self._most_nbits} bits")
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
            node, f"raises an integer to a power that is no integer from -{MAX_EXPONENT} to {MAX_EXPONENT}"
        )

    def _shift(self, node: Node) -> int:
        distance = node.args[1]
        if isinstance(distance, int) and 0 <= distance <= MAX_EXPONENT:
            return distance
        raise self._invalid(node, f"shifts by what is no integer from 0 to {MAX_EXPONENT}")

    def _is_float(self, operand: Argument) -> bool:
        if not isinstance(operand, str):
            return isinstance(operand, float | FloatArgument)
        meta = self._values.get(operand)
        return self._are_floats.get(operand, isinstance(meta, ScalarMeta) and meta.type == "float")

    def _number_nbits(self, operand: Argument, node: Node) -> int:
        """Return the most bits that an operand may have."""
        if isinstance(operand, int):
            return operand.bit_length()
        if isinstance(operand, SizeArgument | float | FloatArgument):
            return _NUMBER_NBITS
        meta = self._values.get(operand) if isinstance(operand, str) else None
        if not isinstance(operand, str) or not isinstance(meta, SizeMeta | ScalarMeta):
            raise self._invalid(node, "takes numbers only")
        return self._nbits.get(operand, _NUMBER_NBITS)

    def _check_effect(self, node: Node) -> None:
        if node.op == "torch::enter_autocast":
            self._check_autocast(node)
            self._regions.append((node, self._where))
        elif node.op == "torch::enter_checkpoint":
            self._check_checkpoint(node)
            self._regions.append((node, self._where))
        elif node.op in ("torch::exit_autocast", "torch::exit_checkpoint"):
            begun = self._regions.pop()[0] if self._regions else None
            if begun is None or (begun.name, begun.op) != (node.args[0], node.op.replace("exit", "enter")):
                message = f"builtin `{node.op}` leaves a region that is not the innermost one"
                raise self._where.invalid(message, "region-open")
        elif node.op == "torch::set_grad_enabled":
            mode = node.args[0]
            meta = self._values.get(mode) if isinstance(mode, str) else None
            if not isinstance(mode, bool) and not isinstance(meta, NothingMeta | SizeMeta | ScalarMeta):
                raise self._invalid(node, "takes a truth value")

    def _check_checkpoint(self, node: Node) -> None:
        arguments, repeats_draws = node.args
        names = arguments if isinstance(arguments, list) else [arguments]
        tensors = [isinstance(name, str) and isinstance(self._values.get(name), TensorMeta) for name in names]
        if not (isinstance(arguments, list) and all(tensors) and isinstance(repeats_draws, bool)):
            raise self._invalid(node, "takes an array of tensors and a truth value")
        if any(region.op == node.op for region, _ in self._regions):
            raise self._invalid(node, "begins within another")

    def _check_autocast(self, node: Node) -> None:
        device, dtype, enabled, cache_enabled = node.args
        is_dtype = dtype is None or isinstance(dtype, DTypeArgument)
        if not (isinstance(device, DeviceArgument) and is_dtype):
            raise self._invalid(node, "takes a device, a dtype and two truth values")
        if not (isinstance(enabled, bool) and isinstance(cache_enabled, bool)):
            raise self._invalid(node, "takes a device, a dtype and two truth values")


def _are_strings(argument: Argument) -> bool:
    return isinstance(argument, list) and all(isinstance(item, StringArgument) for item in argument)


def _is_count(argument: Argument) -> bool:
    return isinstance(argument, int) and not isinstance(argument, bool) and argument >= 0


def _are_indices(argument: Argument, count: int) -> bool:
    if not isinstance(argument, list) or len(argument) != len({repr(index) for index in argument}):
        return False
    return all(_is_count(index) and isinstance(index, int) and index < count for index in argument)
