"""Rules of calls that are no operators of torch: arithmetic, regions of interpreter state, operators with bodies.

Numbers have bounded size: `2 ** (10 ** 9)` is short, and exhausts memory. Others have 64 bits: `execution/checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType

from aotexport_runtime.allowed.operators import FLOAT_FUNCTIONS, OPERANDS
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema import values as records
from aotexport_runtime.schema.graph import DTENSOR, Graph, Node, Subclass
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.values import Argument, SequenceMeta, SubgraphArgument, ValueMeta
from aotexport_runtime.validate.arguments import NUMBERS, Values, described, described_argument, kind_of, metas_of
from aotexport_runtime.validate.trees import count_parts, is_placement
from aotexport_runtime.values.sizes import MAX_EXPONENT

_NUMBER_NBITS = 64
_TO_FLOAT = ("truediv", "sym_float", *FLOAT_FUNCTIONS)
_TO_INTEGER = (
    *("eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "xor", "lshift", "rshift"),
    *("sym_int", "floor", "ceil", "round"),
)
_ONE_OF_THEM = ("sym_max", "sym_min", "sym_ite")


class Builtins:
    """The builtin calls of one graph, in order."""

    _node: Node
    _where: Place

    def __init__(self, values: Values, subclasses: Sequence[Subclass] = (), limits: Limits = DEFAULT) -> None:
        """Check calls that refer to `values`, which grows as the graph defines them, and to its `subclasses`."""
        self._values = values
        self._subclasses = subclasses
        self._most_nbits = limits.number_nbits
        self._nbits: dict[str, int | None] = {}
        self._regions: list[tuple[Node, Place]] = []

    def check(self, node: Node, where: Place) -> None:
        """Refuse a call with operands that it does not take; operators of torch and custom ones pass."""
        kinds = OPERANDS.get(node.op)
        if kinds is None:
            return
        self._node, self._where = node, where
        if len(node.args) != len(kinds) or node.kwargs:
            found = len(node.args) + len(node.kwargs)
            raise self._fault(f"takes {len(kinds)} operands, got {found}", "operator-arguments/operands")
        for index, (kind, operand) in enumerate(zip(kinds, node.args, strict=True)):
            if not _takes(kind, operand, self._values):
                self._where = where.at("args", index)
                raise self._fault(f"takes {kind} as operand {index}", "operator-arguments/operand")
        if node.op == "python::getitem":
            self._check_item()
        elif node.op.startswith("python::"):
            self._check_arithmetic()
        elif node.op == "higher_order::autograd_function":
            self._check_function()
        elif node.op in ("subclass::wrap", "distributed::from_local"):
            self._check_structure()
        elif node.op.startswith("torch::"):
            self._check_effect()

    def check_closed(self) -> None:
        """Refuse a region that the graph leaves open."""
        if self._regions:
            raise self._regions[-1][1].invalid("a region is not left", "region-open/region")

    def _fault(self, reason: str, check: str) -> BundleInvalid:
        return self._where.invalid(f"builtin `{self._node.op}` {reason}", check)

    def _check_result(self, *kinds: str) -> None:
        said = described(self._node.meta)
        if said not in kinds:
            self._where = self._where.at("meta")
            raise self._fault(f"gives {' or '.join(kinds)}, and the graph says {said}", "result-type/builtin")

    def _check_structure(self) -> None:
        first, index, *_ = self._node.args
        if not (isinstance(index, int) and index < len(self._subclasses)):
            raise self._fault("takes no structure that the graph has", "operator-arguments/structure")
        structure = self._subclasses[index]
        count = count_parts(structure)
        if self._node.op == "distributed::from_local":
            if structure.type != DTENSOR:
                raise self._fault("takes the structure of a distributed tensor", "operator-arguments/distributed")
        elif len(_items(first)) != count:
            raise self._fault(f"takes {count} tensors, got {len(_items(first))}", "operator-arguments/parts")

    def _check_function(self) -> None:
        _, backwards, operands, _, outputs, _, dirty, nondifferentiable, materializes, _ = self._node.args
        assert isinstance(outputs, int)
        for indices, count in ((dirty, len(_items(operands))), (nondifferentiable, outputs)):
            if any(isinstance(index, int) and index >= count for index in _items(indices)):
                raise self._fault("takes indices of its operands and outputs", "operator-arguments/function-index")
        expected = 1 if materializes else 1 << min(outputs - len(_items(nondifferentiable)), 16)
        found = len(_items(backwards))
        if found != expected:
            reason = f"takes {expected} subgraphs of its backward, got {found}"
            raise self._fault(reason, "operator-arguments/function-backward")

    def _check_item(self) -> None:
        container, index = self._node.args
        meta = self._values[str(container)]
        assert isinstance(meta, SequenceMeta)
        if isinstance(index, records.SliceArgument):
            for part in (index.start, index.stop, index.step):
                if isinstance(part, str) and described(self._values.get(part)) != "an integer":
                    raise self._fault("takes items by what is no integer", "operator-arguments/slice")
            if index.step == 0:
                raise self._fault("takes items by a step of 0", "operator-arguments/slice-step")
        elif isinstance(index, int) and not -len(meta.items) <= index < len(meta.items):
            raise self._fault(f"takes item {index} of a sequence of {len(meta.items)}", "operator-arguments/item")
        if not isinstance(self._node.meta, records.NothingMeta):
            self._check_result(described(meta.items[index] if isinstance(index, int) else meta))

    def _check_arithmetic(self) -> None:
        node, name = self._node, self._node.op.removeprefix("python::")
        given = node.args[0] if isinstance(node.args[0], list) else node.args[name == "sym_ite" :]
        operands = [self._number_nbits(operand) for operand in given]
        whole = [nbits for nbits in operands if nbits is not None]
        if name in _ONE_OF_THEM:
            is_float = not whole  # Where that depends on values it is no float, which has the stricter rules.
        else:
            is_float = name in _TO_FLOAT or (name not in _TO_INTEGER and len(whole) < len(operands))
        if is_float:
            nbits = None
        elif name in ("pow", "lshift"):
            nbits = self._raised(_NUMBER_NBITS if operands[0] is None else operands[0], node.args[1])
        elif name == "mul":
            nbits = sum(whole)
        else:
            nbits = max(whole, default=_NUMBER_NBITS) + len(operands).bit_length()
        if nbits is not None and nbits > self._most_nbits:
            raise self._fault(f"may give numbers of more than {self._most_nbits} bits", "operator-arguments/bits")
        self._nbits[node.name] = nbits
        is_open = name == "pow" or (name in _ONE_OF_THEM and not is_float)
        self._check_result(*("a float", "an integer") if is_open else ["a float" if is_float else "an integer"])

    def _raised(self, nbits: int, exponent: Argument) -> int:
        """Return the most bits of an integer of so many bits that is shifted, or raised to a power."""
        if self._node.op == "python::lshift":
            if isinstance(exponent, int) and 0 <= exponent <= MAX_EXPONENT:
                return nbits + exponent
            raise self._fault(f"shifts by what is no integer from 0 to {MAX_EXPONENT}", "operator-arguments/shift")
        if isinstance(exponent, int) and abs(exponent) <= MAX_EXPONENT:
            return nbits * abs(exponent)
        reason = f"raises an integer to a power that is no integer from -{MAX_EXPONENT} to {MAX_EXPONENT}"
        raise self._fault(reason, "operator-arguments/exponent")

    def _number_nbits(self, operand: Argument) -> int | None:
        """Return the most bits that an integer may have; None: a float."""
        if isinstance(operand, int):
            return operand.bit_length()
        if isinstance(operand, str) and operand in self._nbits:
            return self._nbits[operand]
        return None if kind_of(operand, self._values) == "float" else _NUMBER_NBITS

    def _check_effect(self) -> None:
        node = self._node
        if node.op == "torch::enter_checkpoint" and any(region.op == node.op for region, _ in self._regions):
            raise self._fault("begins within another", "operator-arguments/checkpoint")
        if node.op.startswith("torch::enter"):
            self._regions.append((node, self._where))
        elif node.op.startswith("torch::exit"):
            begun = self._regions.pop()[0] if self._regions else None
            if begun is None or (begun.name, begun.op) != (node.args[0], node.op.replace("exit", "enter")):
                raise self._fault("leaves a region that is not the innermost one", "region-open/region")
        self._check_result("an integer" if node.op == "torch::is_grad_enabled" else "nothing")


def _items(operand: Argument) -> list[Argument]:
    assert isinstance(operand, list)
    return [*operand]


_CONSTANTS: dict[str, tuple[type, ...]] = {
    "a number": (bool, int, float, records.SizeArgument, records.FloatArgument),
    "a grad mode": (bool,),
    "a truth value": (bool,),
    "an integer or a slice": (int, records.SliceArgument),
    "a count": (int,),
    "the index of a structure": (int,),
    "a body": (SubgraphArgument,),
    "a body or null": (SubgraphArgument, NoneType),
    "an array": (list,),
    "a string": (records.StringArgument,),
    "a placement": (records.StringArgument,),
    "a device": (records.DeviceArgument,),
    "a dtype or null": (records.DTypeArgument, NoneType),
}
"""Types of constants that an operand of a kind may be; a truth value is no integer."""

_VALUES = {"a number": NUMBERS, "a grad mode": NUMBERS, "a tensor": ("tensor",), "a sequence": ("sequence",)}
"""Kinds of values that it may be."""

_ITEMS = {
    "an array of numbers": "a number",
    "an array of tensors": "a tensor",
    "an array of bodies and null": "a body or null",
    "an array of indices": "a count",
    "an array of placements": "a placement",
}
"""Kinds of arrays, with the kind of their items."""


def _takes(kind: str, operand: Argument, values: Values) -> bool:
    """Return whether an operand is of a kind of `OPERANDS`, as far as it alone can say it."""
    if kind in ("a region", "a predicate") or (kind == "an array of placements or null" and operand is None):
        return True
    item = _ITEMS.get(kind.removesuffix(" or null"))
    if item is not None:
        if not isinstance(operand, list) or not all(_takes(item, each, values) for each in operand):
            return False
        return kind != "an array of indices" or len(set(map(repr, operand))) == len(operand)
    if isinstance(operand, str):
        return kind_of(operand, values) in _VALUES.get(kind, ())
    if kind in ("a count", "the index of a structure") and isinstance(operand, int) and operand < 0:
        return False
    return type(operand) in _CONSTANTS.get(kind, ()) and (kind != "a placement" or is_placement(operand))


_BODIES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "higher_order::cond": ((1, 2), (3,)),
    "higher_order::while_loop": ((0, 1), (2, 3)),
    "higher_order::while_loop_stack_output": ((0, 1), (2, 3)),
    "higher_order::scan": ((0,), (1, 2, 3)),
    "higher_order::map_impl": ((0,), (1, 2)),
    "higher_order::invoke_subgraph": ((0,), (1,)),
    "higher_order::autograd_function": ((0,), (2, 3)),
}
"""Per operator the positions of bodies that all take the same, and of the lists that they take."""

_OVER_ROWS = {"higher_order::scan": 2, "higher_order::map_impl": 1}
"""Position of the list of tensors that bodies take row by row."""


def check_bodies(node: Node, subgraphs: Mapping[str, Graph], values: Values, where: Place, *, typed: bool) -> None:
    """Refuse bodies that take other values than they get, or results that are not what bodies return.

    `node` is a call whose operands were checked; `typed`: no autocast changes dtypes from what the graph says.
    """
    if node.op == "higher_order::register_hook":
        _check_taken(node, _body(node.args[0], subgraphs), 1 + len(_items(node.args[2])), where)
    if node.op not in _BODIES:
        return
    positions, lists = _BODIES[node.op]
    bodies = [_body(node.args[position], subgraphs) for position in positions]
    operands = [
        described_argument(operand, values, -(_OVER_ROWS.get(node.op) == index), typed=typed)
        for index in lists
        for operand in _items(node.args[index])
    ]
    for body in bodies:
        _check_taken(node, body, len(operands), where)
        for given, taken in zip(operands, body.inputs, strict=True):
            expected = described(taken.meta, typed=typed)
            # Nothing stands for an operand that the body does not use.
            if given not in (None, "nothing", expected) and expected != "nothing":
                message = f"a body of `{node.op}` takes {expected}, and gets {given}"
                raise where.invalid(message, "operator-arguments/body-operand")
    if node.op == "higher_order::cond":
        _check_truth(node, node.args[0], values, where)
    if node.op.startswith("higher_order::while_loop"):
        condition, *bodies = bodies
        decision = condition.outputs[0] if len(condition.outputs) == 1 else None
        _check_truth(node, decision, metas_of(condition), where)
    if not isinstance(node.meta, SequenceMeta):
        message = f"`{node.op}` gives a sequence, and the graph says otherwise"
        raise where.at("meta").invalid(message, "result-type/body-sequence")
    for body in bodies:
        _check_results(node, node.meta.items, body, where.at("meta"))


def _body(argument: Argument, subgraphs: Mapping[str, Graph]) -> Graph:
    assert isinstance(argument, SubgraphArgument)
    return subgraphs[argument.name]


def _check_taken(node: Node, body: Graph, count: int, where: Place) -> None:
    message = f"a body of `{node.op}` takes {len(body.inputs)} values, and gets {count}"
    where.require(len(body.inputs) == count, message, "operator-arguments/body-count")


def _check_truth(node: Node, argument: Argument, values: Values, where: Place) -> None:
    meta = values.get(argument) if isinstance(argument, str) else None
    is_number = isinstance(argument, int | records.SizeArgument) or kind_of(meta) in NUMBERS
    is_one = isinstance(meta, records.TensorMeta) and all(size == 1 for size in meta.shape if isinstance(size, int))
    message = f"`{node.op}` decides by what is no truth value, and no tensor of one element"
    where.require(is_number or is_one, message, "operator-arguments/predicate")


def _check_results(node: Node, items: Sequence[ValueMeta], body: Graph, where: Place) -> None:
    outputs, values = body.outputs, metas_of(body)
    if node.op == "higher_order::autograd_function":
        assert isinstance(node.args[4], int)
        outputs = outputs[: node.args[4]]
    # Metadata within a region of autocast tell of none.
    typed = not any(each.op == "torch::enter_autocast" for each in body.nodes)
    # What the body returns in a step is stacked, but for what `scan` carries on.
    whole = len(_items(node.args[1])) if node.op == "higher_order::scan" else 0
    is_stacked = node.op in ("higher_order::scan", "higher_order::while_loop_stack_output", "higher_order::map_impl")
    found = [
        described_argument(output, values, int(is_stacked and index >= whole), typed=typed)
        for index, output in enumerate(outputs)
    ]
    said = [described(item, typed=typed) for item in items]
    if len(said) != len(found) or any(each not in (None, other) for each, other in zip(found, said, strict=True)):
        message = f"`{node.op}` gives what its body returns, and the graph says otherwise"
        raise where.invalid(message, "result-type/body")
