"""Metadata of values in a graph, and arguments of operators.

An argument is plain JSON where JSON can say it: `null`, a boolean, an integer, a finite float, an array; a
string is a reference to the value of that name. Everything else is an object with a `kind`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from aotexport_runtime.schema.bounded import MAX_AXES, Bounds, Record
from aotexport_runtime.schema.sizes import Size

IntegerType = Literal["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
FloatType = Literal["float16", "float32", "float64"]
_OtherType = Literal["bfloat16", "complex32", "complex64", "complex128"]
_FloatOf8Bits = Literal["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
DType = Literal[IntegerType, FloatType, _OtherType, _FloatOf8Bits]
_NarrowInteger = Literal["int1", "int2", "int3", "int4", "int5", "int6", "int7"]
_NarrowUnsigned = Literal["uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"]
NarrowDType = Literal[_NarrowInteger, _NarrowUnsigned]
"""Element types that no tensor of a bundle has, and that quantised ones name in their contexts."""
AnyDType = Literal[DType, NarrowDType]
MemoryFormat = Literal["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"]
Layout = Literal["strided"]
DeviceClass = Literal["cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu"]
"""A class of devices with memory of its own. `meta` has none: its tensors pass bounds checks and point nowhere."""


class TensorMeta(Record, kw_only=True, tag="tensor", tag_field="kind"):
    """Metadata of a strided tensor.

    Attributes:
        stride: step per axis, in elements.
        offset: storage offset, in elements; said of inputs only, 0 for results.
        device: device class at capture; a load may place it elsewhere.
        requires_grad: of an input or output of a program: whether it required grad at capture.
    """

    dtype: DType
    shape: Annotated[tuple[Size, ...], Bounds(maxItems=MAX_AXES, code="tensor-layout", apart=True)]
    stride: Annotated[tuple[Size, ...], Bounds(maxItems=MAX_AXES, code="tensor-layout", apart=True)]
    offset: Size = 0
    device: DeviceClass = "cpu"
    requires_grad: bool = False


class SizeMeta(Record, kw_only=True, tag="size", tag_field="kind"):
    """An integer (or truth value, as 0 or 1) over the program's symbols; None: it depends on the data of tensors."""

    value: Size | None = None


class ScalarMeta(Record, kw_only=True, tag="scalar", tag_field="kind"):
    """A Python number computed at run time, by its type."""

    type: Literal["float", "bool", "int"]


class SequenceMeta(Record, kw_only=True, tag="sequence", tag_field="kind"):
    """The tuple or list that an operator with several results returns: metadata per result, in order."""

    items: tuple[ValueMeta, ...]


class NothingMeta(Record, kw_only=True, tag="nothing", tag_field="kind"):
    """No value: the operator is called for its effect."""


ValueMeta = TensorMeta | SizeMeta | ScalarMeta | SequenceMeta | NothingMeta


class StringArgument(Record, kw_only=True, tag="string", tag_field="kind"):
    """A string argument (a bare JSON string is a reference to a value)."""

    value: str


class FloatArgument(Record, kw_only=True, tag="float", tag_field="kind"):
    """A float that JSON has no literal for; sign and payload of a NaN are not kept."""

    value: Literal["inf", "-inf", "nan"]


class ComplexArgument(Record, kw_only=True, tag="complex", tag_field="kind"):
    """A complex number."""

    real: float | FloatArgument
    imag: float | FloatArgument


class DTypeArgument(Record, kw_only=True, tag="dtype", tag_field="kind"):
    """A `torch.dtype`, by its name without `torch.`."""

    value: AnyDType


class DeviceArgument(Record, kw_only=True, tag="device", tag_field="kind"):
    """A `torch.device`, by its class at capture; a loader that places the bundle elsewhere replaces it."""

    type: DeviceClass


class LayoutArgument(Record, kw_only=True, tag="layout", tag_field="kind"):
    """A `torch.layout`, by its name without `torch.`; tensors of a bundle are strided."""

    value: Layout


class MemoryFormatArgument(Record, kw_only=True, tag="memory_format", tag_field="kind"):
    """A `torch.memory_format`, by its name without `torch.`."""

    value: MemoryFormat


class SizeArgument(Record, kw_only=True, tag="size", tag_field="kind"):
    """An integer computed from the program's symbols, by its expression."""

    value: Size


class SubgraphArgument(Record, kw_only=True, tag="subgraph", tag_field="kind"):
    """A body of a higher-order operator, by its key in `Graph.subgraphs`."""

    name: str


class SliceArgument(Record, kw_only=True, tag="slice", tag_field="kind"):
    """A Python slice; a string is a reference to a value of the graph, None as Python takes it."""

    start: int | str | None = None
    stop: int | str | None = None
    step: int | str | None = None


_Literal = StringArgument | FloatArgument | ComplexArgument | SliceArgument
_Named = DTypeArgument | DeviceArgument | LayoutArgument | MemoryFormatArgument
Element = bool | int | float | str | _Literal | _Named | SizeArgument | SubgraphArgument | None
"""An argument that is no array."""

if TYPE_CHECKING:
    Argument: TypeAlias = Element | list["Argument"]
else:
    # Decoders know no recursive types; operators take at most three levels.
    Argument = Element | list[Element | list[Element | list[Element]]]
"""An argument: an element, or an array nested at most three deep."""
