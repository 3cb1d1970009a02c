"""Nested inputs and outputs as data: which containers, with which keys, around which leaves."""

from __future__ import annotations

from typing import Literal

from aotexport_runtime.schema.bounded import ClassName, Count, Hexadecimal, Record
from aotexport_runtime.schema.values import Argument, FloatArgument, FloatType, IntegerType

NumpyType = Literal[IntegerType, FloatType]
Factory = Literal["list", "dict", "set", "tuple", "int", "float", "str", "bool"]


class Leaf(Record, kw_only=True, tag="leaf", tag_field="kind"):
    """A tensor, symbolic integer or NumPy array.

    Attributes:
        index: of an input tree: index into `Program.inputs`; of an output tree: index into `Program.outputs`.
        array: whether it is a `numpy.ndarray`, in programs a tensor of its memory; all leaves of an index are, or none.
    """

    index: Count
    array: bool = False


class Bytes(Record, kw_only=True, tag="bytes", tag_field="kind"):
    """A string of bytes: two hexadecimal digits per byte, in lower case."""

    hex: Hexadecimal


PlainKey = str | int | float | bool | Bytes | None
Key = PlainKey | tuple[PlainKey, ...]
"""A key of a dict."""


class Range(Record, kw_only=True, tag="range", tag_field="kind"):
    """A `range`; its step is not 0."""

    start: int
    stop: int
    step: int


class EllipsisLiteral(Record, kw_only=True, tag="ellipsis", tag_field="kind"):
    """Python's `...`."""


class NumpyNumber(Record, kw_only=True, tag="numpy_number", tag_field="kind"):
    """A NumPy scalar; its type is by NumPy's name."""

    dtype: NumpyType
    value: bool | int | float | FloatArgument


PythonValue = Bytes | Range | EllipsisLiteral | NumpyNumber
"""A value that no operator takes."""


class Constant(Record, kw_only=True, tag="constant", tag_field="kind"):
    """A Python value fixed at capture; in an input tree, a call must pass an equal one of the same type."""

    value: Argument | PythonValue


class Sequence(Record, kw_only=True, tag="sequence", tag_field="kind"):
    """A sequence.

    Attributes:
        type: `size`: a `torch.Size`, whose items are constants; `set`, `frozenset`: their items are constants, in an
            order that means nothing; `deque`: a `collections.deque`.
        max_items: of a `deque`: how many items it keeps at most; None: any number.
        name: of a `list` or `tuple` of a class of its own: the class's name, without its module (8.3, 8.10).
    """

    type: Literal["tuple", "list", "size", "set", "frozenset", "deque"]
    items: tuple[Tree, ...]
    max_items: Count | None = None
    name: str | None = None


class Mapping(Record, kw_only=True, tag="mapping", tag_field="kind"):
    """A dict (of a call: also a `collections.UserDict`); its order is insertion order.

    Attributes:
        type: of a result: as what class of `collections` it is rebuilt; of an argument any will do (8.3).
        keys: an array is a tuple. Floats among them are finite.
        factory: of a `default_dict`: name of the type that makes its missing values.
        any_order: of an argument: whether a call may have the keys in any order: the model reads them by name.
    """

    type: Literal["dict", "ordered_dict", "default_dict", "counter"]
    keys: tuple[Key, ...]
    items: tuple[Tree, ...]
    factory: Factory | None = None
    any_order: bool = False


class NamedFields(Record, kw_only=True, tag="named_fields", tag_field="kind"):
    """A named tuple, dataclass, model output, or object with attributes; rebuilt as one of that name and fields.

    Attributes:
        type: `return_type`: torch's own named tuple (`torch.return_types.max`); `object`: of any other class, the name
            of which a call's object has; `model_output`: an ordered mapping with attribute and integer access, without
            the entries that are None.
        name: class name, without its module.
    """

    type: Literal["namedtuple", "return_type", "dataclass", "object", "model_output"]
    name: str
    fields: tuple[str, ...]
    items: tuple[Tree, ...]


class Instance(Record, kw_only=True, tag="instance", tag_field="kind"):
    """An object of a class that the caller of a reader names; only in contexts of tensor subclasses.

    Attributes:
        form: `enum`: a member by its name, the one item; `dataclass` and `namedtuple`: made from its fields.
        fields: field names, in order; `name` of an enum.
    """

    form: Literal["dataclass", "namedtuple", "enum"]
    type: ClassName
    fields: tuple[str, ...]
    items: tuple[Tree, ...]


Tree = Leaf | Constant | Sequence | Mapping | NamedFields | Instance
