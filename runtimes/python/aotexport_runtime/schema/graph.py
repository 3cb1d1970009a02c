"""Graphs: single static assignment over full operator names, with provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

from aotexport_runtime.schema import bounded
from aotexport_runtime.schema.bounded import Bounds, Code, Count, IndexOf, Line, OperatorName, Record, TableIndex
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.schema.values import Argument, ValueMeta

if TYPE_CHECKING:
    SharedMeta: TypeAlias = ValueMeta
    SharedOperator: TypeAlias = OperatorName
else:
    # Indexes stand in files alone: `codec.py`.
    SharedMeta = ValueMeta | TableIndex
    SharedOperator = OperatorName | TableIndex


DTENSOR = "torch.distributed.tensor:DTensor"
"""`Subclass.type` of distributed tensors."""


class Subclass(Record, kw_only=True):
    """The structure of one tensor of a wrapper subclass; its parts, depth first, are listed where the record is used.

    Attributes:
        type: its class, `module:qualified.name`.
        attributes: names of the inner tensors, in the order of `__tensor_flatten__`.
        inner: structure per inner tensor; None: a plain tensor, one part.
        context: the second result of `__tensor_flatten__`; a tree without leaves.
        shape: size per axis of the whole.
        stride: step per axis of the whole, in elements.
    """

    type: bounded.ClassName
    attributes: Annotated[tuple[str, ...], bounded.Unique()]
    inner: Annotated[tuple[Subclass | None, ...], bounded.Length("Subclass.attributes", "structure-malformed")]
    context: Tree
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]


class SourceLine(Record, kw_only=True):
    """A line of the user's code.

    Attributes:
        file: path relative to the exported model, or below `site-packages`; never absolute.
        line: its number, from 1.
    """

    file: str
    line: Count
    function: str


class GraphInput(Record, kw_only=True):
    """A placeholder, bound by position; its name is unique, its metadata may be an index in `Graph.metas`."""

    name: str
    meta: SharedMeta


class Node(Record, kw_only=True):
    """One operator call; its result is the value `name`.

    Attributes:
        name: unique in its graph.
        op: full name with overload (`aten::addmm.default`), or of a `python::` builtin; or index in `Graph.operators`.
        args: positional arguments, in the order of the operator's schema.
        meta: metadata of the result, or their index in `Graph.metas`.
        source: index into `Graph.sources`; None: unknown or stripped.
        module: index into `Graph.modules`; None: outside of every module.
    """

    name: str
    op: SharedOperator
    args: list[Argument] = []
    kwargs: dict[str, Argument] = {}
    meta: SharedMeta
    source: Annotated[Count, IndexOf("Graph.sources")] | None = None
    module: Annotated[Count, IndexOf("Graph.modules")] | None = None


class ModuleCall(Record, kw_only=True):
    """A call of a submodule: a run of a graph's nodes that takes and returns values of the graph.

    Attributes:
        end: index of the first node after it; `begin`, that of its first node: the call has no nodes of its own.
        parent: index into `Graph.calls` of the call that this one is a part of.
        arguments: structure of the pair of its positional and keyword arguments; leaves index `values`.
        result: structure of its result; leaves index `values`.
        values: values and sizes among arguments and results; None: nothing uses it, and the graph does not compute it.
        refusal: why it cannot be told apart from the rest, for people; the structures are then None.
    """

    module: Annotated[Count, IndexOf("Graph.modules")]
    begin: Annotated[Count, Code("module-malformed")]
    end: Annotated[Count, Code("module-malformed")]
    parent: Annotated[Count, IndexOf("Graph.calls")] | None = None
    arguments: Annotated[Tree | None, IndexOf("ModuleCall.values")] = None
    result: Annotated[Tree | None, IndexOf("ModuleCall.values")] = None
    values: list[Argument] = []
    refusal: Line | None = None


class Graph(Record, kw_only=True):
    """A straight-line program.

    Attributes:
        nodes: operator calls in an order of execution; a node refers to inputs and earlier nodes only.
        schemas: signature per operator of PyTorch's registry that it calls, as PyTorch writes it; a lowered graph may
            lack some.
        subgraphs: bodies of higher-order operators; their inputs are their only names.
        modules: table of module paths (FQNs of the user's submodules).
        metas: table of metadata that inputs and nodes share.
        operators: table of operator names that nodes share.
        subclasses: table of the structures that `subclass::wrap` gives to plain tensors.
        calls: of a forward graph: calls of submodules in the order in which they began. Readers may ignore them.
    """

    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: list[Argument]
    schemas: dict[str, str] = {}
    subgraphs: dict[str, Graph] = {}
    sources: tuple[SourceLine, ...] = ()
    modules: tuple[str, ...] = ()
    metas: tuple[ValueMeta, ...] = ()
    operators: Annotated[tuple[OperatorName, ...], Bounds(code="operator-malformed", apart=True)] = ()
    subclasses: tuple[Subclass, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
