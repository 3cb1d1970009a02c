"""Lowered graphs to graph records: sizes over the program's symbols, launches by kernel name."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from aotexport.encode.values import encode_argument, encode_meta
from aotexport.errors import ExportFailed
from aotexport.lower.cuda.retarget import CannotLower, check_on_gpu, inverse, memory_order
from aotexport.lower.cuda.wrapper import launch
from aotexport.torch_internals.names import OpOverload
from aotexport.values.sizes import encode_size
from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.values import (
    Argument,
    DeviceArgument,
    NothingMeta,
    SequenceMeta,
    SizeArgument,
    StringArgument,
    TensorMeta,
    ValueMeta,
)

KERNEL = "kernel::"
_OPERATORS = {torch.empty_strided: "aten::empty_strided.default", operator.getitem: "python::getitem"}
_VIEWS = (
    "aten::as_strided",
    "aten::view",
    "aten::permute",
    "aten::expand",
    "aten::slice",
    "aten::select",
    "aten::alias",
)


@dataclass(frozen=True)
class LoweredGraph:
    """A lowered forward or backward graph: operator calls and launches.

    `inputs` are the names of placeholders that the caller fills, in order; others are the program's symbols. `outputs`
    has per output its name before it was lowered; None: it is no value.
    """

    module: torch.fx.GraphModule
    inputs: list[str]
    outputs: list[str | None]


def encode_lowered(
    lowered: LoweredGraph, inputs: dict[str, str], outputs: Sequence[int | None], namespaces: Collection[str]
) -> Graph:
    """Return the record of a lowered graph; `CannotLower`: the format cannot express it.

    `inputs` has the name in the record per name among `LoweredGraph.inputs`, in the record's order, without sizes. Of
    `outputs`, which to return, None is nothing. `namespaces` are those of the program's custom operators.
    """
    try:
        return _Encoder(lowered, inputs, namespaces).encode(outputs)
    except ExportFailed as error:
        raise CannotLower(str(error)) from None


@dataclass
class _Encoder:
    lowered: LoweredGraph
    inputs: dict[str, str]
    namespaces: Collection[str]
    names: dict[torch.fx.Node, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    schemas: dict[str, str] = field(default_factory=dict)

    def encode(self, outputs: Sequence[int | None]) -> Graph:
        graph = self.lowered.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        metas: dict[str, ValueMeta] = {}
        for name, node in zip(self.lowered.inputs, placeholders, strict=False):
            if name in self.inputs:
                self.names[node] = self.inputs[name]
                metas[self.inputs[name]] = _on_gpu(encode_meta(node.meta["val"]))
        for node in graph.nodes:
            if node.op == "get_attr":
                raise CannotLower(f"the graph closes over `{node.target}`")
            if isinstance(node.meta.get("val"), torch.SymInt) and node not in self.names:
                self.names[node] = _size(node.meta["val"])
            elif node.op == "call_function":
                self._call(node)
        returned: Any = graph.output_node().args[0]
        returned = returned if isinstance(returned, tuple | list) else [returned]
        return Graph(
            inputs=tuple(GraphInput(name=name, meta=metas[name]) for name in self.inputs.values()),
            nodes=tuple(self.nodes),
            outputs=[None if index is None else self._argument(returned[index]) for index in outputs],
            schemas=self.schemas,
        )

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is launch:
            kwargs = {name: self._argument(value) for name, value in node.kwargs.items()}
            self._add(node, f"{KERNEL}{node.meta['kernel'].name}", [], kwargs)
        elif node.target is torch.as_strided:
            self._as_strided(node)
        elif isinstance(node.target, OpOverload):
            self._operator(node, node.target)
        elif node.target in _OPERATORS:
            args = [self._argument(value) for value in node.args]
            kwargs = {name: self._argument(value) for name, value in node.kwargs.items()}
            if node.target is torch.empty_strided:
                kwargs["device"] = DeviceArgument(type="cuda")
            self._add(node, _OPERATORS[node.target], args, kwargs)
            if node.target is operator.getitem:
                self._check_layout(node)
        else:
            raise CannotLower(f"the lowered graph calls `{getattr(node.target, '__name__', node.target)}`")

    def _operator(self, node: torch.fx.Node, target: Any) -> None:
        # The compiler's passes may have inserted it.
        check_on_gpu(target)
        schema = target._schema
        name = f"{schema.name}.{schema.overload_name or 'default'}"
        if name.startswith("aten::") and name.removeprefix("aten::") not in allowed_aten_operators():
            raise CannotLower(f"operator `{name}` is not on the list of operators that a bundle may call")
        custom = not name.startswith("aten::")
        if custom and name.partition("::")[0] not in self.namespaces:
            raise CannotLower(f"custom operator `{name}` is left in the lowered graph")
        self.schemas[name] = str(schema)
        args = [self._argument(value) for value in node.args]
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        self._add(node, name, args, kwargs)
        # In-place operators of torch return their operand, custom ones return memory of their own.
        if (custom or not schema.is_mutable) and not name.startswith(_VIEWS):
            self._check_layout(node)

    def _check_layout(self, node: torch.fx.Node) -> None:
        """Copy a result that a library may lay out in another way than kernels read it."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        if value.is_contiguous():
            self._follow(node, "laid_out", "aten::contiguous.default", value)
            return
        order = memory_order(value)
        turned = value.permute(order)
        if not turned.is_contiguous():
            self._copied(node, value)
            return
        self._follow(node, "turned", "aten::permute.default", turned, order)
        self._follow(node, "laid_out", "aten::contiguous.default", turned)
        self._follow(node, "turned_back", "aten::permute.default", value, inverse(order))

    def _copied(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """Copy a result with gaps in its memory to memory with the same gaps."""
        if any(step == 0 for step in value.stride()):
            raise CannotLower(f"operator `{node.target}` is relied on to lay its result out as {value.stride()}")
        meta = _on_gpu(encode_meta(value))
        args = [self._argument(list(value.shape)), self._argument(list(value.stride()))]
        kwargs = {"dtype": self._argument(value.dtype), "device": DeviceArgument(type="cuda")}
        place = f"{node.name}_place"
        self.nodes.append(Node(name=place, op=_OPERATORS[torch.empty_strided], args=args, kwargs=kwargs, meta=meta))
        copy = Node(name=f"{node.name}_copied", op="aten::copy_.default", args=[place, self.names[node]], meta=meta)
        self.nodes.append(copy)
        self.names[node] = copy.name

    def _follow(self, node: torch.fx.Node, label: str, op: str, value: torch.Tensor, *rest: list[int]) -> None:
        """Add an operator on the value of `node`, which gives `value`; later nodes use its result instead."""
        args: list[Argument] = [self.names[node], *map(list[Argument], rest)]
        self.nodes.append(Node(name=f"{node.name}_{label}", op=op, args=args, meta=_on_gpu(encode_meta(value))))
        self.names[node] = self.nodes[-1].name

    def _as_strided(self, node: torch.fx.Node) -> None:
        """Encode a view of memory relative to its base: an input may begin anywhere in its storage."""
        base, size, stride, offset = node.args
        assert isinstance(base, torch.fx.Node)
        if _is_allocated(base):
            self._add(
                node, "aten::as_strided.default", [self._argument(value) for value in (base, size, stride, offset)], {}
            )
            return
        offset = offset.meta["val"] if isinstance(offset, torch.fx.Node) else offset
        distance: Any = offset - base.meta["val"].storage_offset()
        name = self.names[base]
        if not (isinstance(distance, int) and distance == 0):
            name = self._shifted(node, base, distance)
        self._add(node, "aten::as_strided.default", [name, self._argument(size), self._argument(stride)], {})

    def _shifted(self, node: torch.fx.Node, base: torch.fx.Node, distance: Any) -> str:
        """Add the empty tensor that begins `distance` elements after `base`, for views of it; return its name."""
        if isinstance(distance, int) and distance < 0:
            raise CannotLower("a view begins before its base")
        start = _size(distance)
        meta = _on_gpu(encode_meta(base.meta["val"]))
        before, place = f"{node.name}_before", f"{node.name}_place"
        before_meta = msgspec.structs.replace(meta, shape=(encode_size(distance),), stride=(1,))
        before_args: list[Argument] = [self.names[base], [start], [1]]
        self.nodes.append(Node(name=before, op="aten::as_strided.default", args=before_args, meta=before_meta))
        place_meta = msgspec.structs.replace(meta, shape=(0,), stride=(1,))
        self.nodes.append(Node(name=place, op="aten::slice.Tensor", args=[before, 0, start, start], meta=place_meta))
        return place

    def _add(self, node: torch.fx.Node, op: str, args: list[Argument], kwargs: dict[str, Argument]) -> None:
        meta = NothingMeta() if op.startswith(KERNEL) else _on_gpu(encode_meta(node.meta.get("val")))
        self.names[node] = node.name
        self.nodes.append(Node(name=node.name, op=op, args=args, kwargs=kwargs, meta=meta))

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, str):
            return DeviceArgument(type="cuda") if value == "cuda" else StringArgument(value=value)
        return encode_argument(value, self.names, "a lowered graph")


def _is_allocated(node: torch.fx.Node) -> bool:
    """Return whether the memory of a value is the graph's own, and begins at offset 0."""
    while node.target is torch.as_strided and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node.target is torch.empty_strided


def _size(value: Any) -> Any:
    size = encode_size(value)
    return size if isinstance(size, int) else SizeArgument(value=size)


def _on_gpu(meta: ValueMeta) -> ValueMeta:
    if isinstance(meta, TensorMeta):
        return msgspec.structs.replace(meta, device="cuda", requires_grad=False)
    if isinstance(meta, SequenceMeta):
        return SequenceMeta(items=tuple(map(_on_gpu, meta.items)))
    return meta
