"""Nested inputs and outputs as data: which containers, with which keys, around which leaves."""

from __future__ import annotations

from typing import Literal

from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.values import Argument

PlainKey = str | int | bool | None
Key = PlainKey | tuple[PlainKey, ...]
"""A key of a dict."""


class Leaf(Record, kw_only=True, tag="leaf", tag_field="kind"):
    """A tensor or symbolic integer.

    Attributes:
        index: of an input tree: index into `Program.inputs`; of an output tree: index into `Program.outputs`.
    """

    index: int


class Constant(Record, kw_only=True, tag="constant", tag_field="kind"):
    """A Python value fixed at capture.

    Attributes:
        value: None, bool, int, float, complex, string, dtype, device, layout, memory format, or slice of integers.
            In an input tree a call must pass an equal value of the same type.
    """

    value: Argument


class Sequence(Record, kw_only=True, tag="sequence", tag_field="kind"):
    """A sequence.

    Attributes:
        type: `size`: a `torch.Size`, whose items are constants; `set`, `frozenset`: their items are constants, in an
            order that means nothing.
        items: in order.
    """

    type: Literal["tuple", "list", "size", "set", "frozenset"]
    items: tuple[Tree, ...]


class Mapping(Record, kw_only=True, tag="mapping", tag_field="kind"):
    """A dict (of a call: also a `collections.UserDict`); its order is insertion order.

    Attributes:
        type: `ordered_dict`: a `collections.OrderedDict`.
        keys: in order; an array is a tuple.
        items: value per key.
    """

    type: Literal["dict", "ordered_dict"]
    keys: tuple[Key, ...]
    items: tuple[Tree, ...]


class NamedFields(Record, kw_only=True, tag="named_fields", tag_field="kind"):
    """A named tuple, dataclass or model output.

    Attributes:
        type: `namedtuple`: rebuilt as a named tuple of that name and fields; `return_type`: torch's own
            (`torch.return_types.max`); `dataclass`: rebuilt as a dataclass of that name; `model_output`: an
            ordered mapping with attribute and integer access, without the entries that are None.
        name: class name, without its module.
        fields: field names, in order.
        items: value per field.
    """

    type: Literal["namedtuple", "return_type", "dataclass", "model_output"]
    name: str
    fields: tuple[str, ...]
    items: tuple[Tree, ...]


class Instance(Record, kw_only=True, tag="instance", tag_field="kind"):
    """An object of a class that the caller of a reader names; only in contexts of tensor subclasses.

    Attributes:
        form: `enum`: a member by its name, the one item; `dataclass` and `namedtuple`: made from its fields.
        type: its class, `module:qualified.name`.
        fields: field names, in order; `name` of an enum.
        items: value per field.
    """

    form: Literal["dataclass", "namedtuple", "enum"]
    type: str
    fields: tuple[str, ...]
    items: tuple[Tree, ...]


Tree = Leaf | Constant | Sequence | Mapping | NamedFields | Instance
