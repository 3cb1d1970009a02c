"""The backward of a joint graph: its incoming gradients, its partitions, and the versions that it checks."""

from __future__ import annotations

from typing import Annotated, Literal

from aotexport_runtime.schema.bounded import Bounds, Count, IndexOf, Length, NameOf, Record, TensorOf, Unique
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import MemoryFormat, TensorMeta

TensorIndex = Annotated[Count, IndexOf("Plain.inputs"), TensorOf("Plain.inputs")]
"""An index of a tensor among the inputs of a functional graph."""


class Tangent(Record, kw_only=True):
    """An incoming gradient of the joint graph.

    Attributes:
        index: index into `FunctionalGraph.mutations`, `Program.outputs` or the intermediate bases, by `of`.
        stride: layout that the graph assumes, a step per axis in elements; None: see `memory_format`.
        memory_format: layout that the graph assumes where `stride` is None.
    """

    of: Literal["mutation", "output", "intermediate_base"]
    index: Count
    meta: TensorMeta
    stride: tuple[Size, ...] | None = None
    memory_format: MemoryFormat | None = None


class Partition(Record, kw_only=True):
    """A partition of the joint graph into forward and backward: the values that are saved in between.

    Attributes:
        name: `default`: everything that backward needs is saved.
        saved: names of values of the joint graph, in its order: inputs, then nodes.
        unchecked: names among `saved` whose version is not checked in backward.
    """

    name: str
    saved: Annotated[tuple[str, ...], Unique()]
    unchecked: tuple[Annotated[str, NameOf("Partition.saved", "partition-malformed")], ...] = ()


class VersionCheck(Record, kw_only=True):
    """A tensor whose memory eager reads in backward, and which the caller can change: an input or output by its index.

    One of its tangents is defined in the passes that check it (10.20).
    """

    of: Literal["input", "output"]
    index: Count
    tangents: Annotated[tuple[Annotated[Count, IndexOf("Gradients.tangents")], ...], Unique()]


class Gradients(Record, kw_only=True):
    """The backward of a joint graph.

    Attributes:
        tangents: graph inputs after `Program.inputs`, in order.
        of_inputs: per entry of `Program.inputs`, index of its gradient among the graph's outputs; None: it has none.
        detached_inputs: inputs without a gradient whose producers and hooks autograd must not visit.
        checks: version checks of eager's backward that differ from those of the graph's saved values (10.20).
        saves_nothing: whether eager saves no tensor for backward (10.20).
        partitions: the first is the default.
    """

    tangents: Annotated[tuple[Tangent, ...], Unique("of index")]
    of_inputs: Annotated[tuple[Count | None, ...], Length("Plain.inputs", "program-malformed")]
    detached_inputs: tuple[TensorIndex, ...] = ()
    checks: Annotated[tuple[VersionCheck, ...], Unique("of index")] = ()
    saves_nothing: bool = False
    partitions: Annotated[tuple[Partition, ...], Bounds(minItems=1, code="program-malformed")]
