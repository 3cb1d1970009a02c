"""Layers of an inference graph whose weights stay, each with what follows it alone: one call of oneDNN. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.rewrite.names import LAYER, names_in, operands, rename, renamed
from aotexport_runtime.rewrite.partition import VIEWS, Subgraph, ancestors
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import SizeArgument, TensorMeta, ValueMeta

CONVOLUTION = "aten::convolution.default"
_NORM = "aten::_native_batch_norm_legit_no_training.default"
_ADD = "aten::add.Tensor"

_LEAST = 1 << 16
"""Least elements of the weight of a matmul: for smaller ones a call of oneDNN costs more than it saves."""

ACTIVATIONS = {
    **{f"aten::{name}.default": name for name in ("relu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "gelu")},
    **{f"aten::{name}.default": name for name in ("hardtanh", "leaky_relu")},
    "aten::silu.default": "swish",
}
"""Activations that oneDNN computes with a layer, with its names for them."""

_AFTER_SUMS = "aten::relu.default"
"""The one that it computes after a sum, too."""


@dataclass
class Layer:
    """A convolution, or a matmul by a constant, and the nodes that follow it.

    Attributes:
        inputs: names of the values that it reads at each call: its input, and what is added to its result.
        weight: name of the weight; of a matmul its second operand.
        nodes: the convolution or matmul, and the batch norm, sum and activation that follow, without views between.
        activation: the last node, if oneDNN computes it too.
    """

    inputs: list[str]
    weight: str
    bias: str | None
    nodes: list[Node]
    norm: Node | None = None
    activation: Node | None = None

    @property
    def constants(self) -> list[str]:
        """Names of the values that its nodes read and none of them makes, without the inputs."""
        known = {*self.inputs, *(node.name for node in self.nodes)}
        read = dict.fromkeys(name for node in self.nodes for name in operands(node))
        return [name for name in read if name not in known]


def constants_of(subgraph: Subgraph, states: Iterable[str], impure: Set[str]) -> set[str]:
    """Return the values that are the same at every call: `states`, and what is computed from them and numbers alone.

    Results of the subgraph are none of them, since each call returns new ones.
    """
    found, returned = set(states), {*impure, *names_in(subgraph.outputs)}
    for node in subgraph.nodes:
        is_fixed = found.issuperset(operands(node)) and not _has_sizes([*node.args, *node.kwargs.values()])
        if is_fixed and node.op.startswith("aten::") and node.name not in returned:
            found.add(node.name)
    return found


def _items(argument: object) -> list[Any]:
    return argument if isinstance(argument, list) else []


def _are_numbers(arguments: Iterable[object]) -> bool:
    return all(isinstance(argument, int | float) for argument in arguments)


def _has_sizes(arguments: Iterable[object]) -> bool:
    return any(_has_sizes(each) if isinstance(each, list) else isinstance(each, SizeArgument) for each in arguments)


def layered(
    subgraph: Subgraph, metas: Mapping[str, ValueMeta], constants: Set[str], *, sums: bool
) -> tuple[dict[str, Layer], Subgraph, list[str]]:
    """Return layers by name of the value that each computes, what is left of `subgraph`, and its further inputs.

    These are some of `constants`, see `constants_of`. `sums`: convolutions add a tensor to their result, too.
    """
    users: dict[str, list[Node | None]] = {name: [None] for name in names_in(subgraph.outputs)}
    for node in subgraph.nodes:
        for name in operands(node):
            users.setdefault(name, []).append(node)
    alias: dict[str, str] = {}
    joined: set[str] = set()
    layers: dict[str, Layer] = {}

    def follower(name: str) -> Node | None:
        """Return the node that alone reads a value, if no layer has it yet."""
        user = users[name][0] if len(users.get(name, ())) == 1 else None
        return None if user is None or user.name in joined else user

    for node in subgraph.nodes:
        layer = None if node.name in constants else _begun(node, metas, constants)
        if layer is not None:
            followed = _followed(layer, follower, metas, constants, sums=sums)
            joined.update([node.name, *followed])
            if len(layer.inputs) == 1:
                layers[node.name] = layer
                alias |= followed
            else:
                layers[layer.nodes[-1].name] = layer
    nodes: list[Node] = []
    for node in subgraph.nodes:
        if (layer := layers.get(node.name)) is not None:
            nodes.append(Node(name=node.name, op=LAYER, args=rename([*layer.inputs], alias), meta=layer.nodes[0].meta))
        elif node.name not in joined:
            nodes.append(renamed(node, alias))
        elif node.name in alias:
            alias[node.name] = alias.get(alias[node.name], alias[node.name])
    outputs = [rename(output, alias) for output in subgraph.outputs]
    made = {node.name for node in subgraph.nodes} & constants
    checks = {node.name for node in nodes if node.name not in users}
    nodes, read = ancestors(nodes, outputs, made, checks)
    fixed = sorted(read)
    return layers, Subgraph([*subgraph.inputs, *fixed], nodes, outputs), fixed


def _begun(node: Node, metas: Mapping[str, ValueMeta], constants: Set[str]) -> Layer | None:
    """Return the layer that begins at a node; None: none does."""
    if node.kwargs or not is_float32(node.meta):
        return None
    least = _LEAST
    if node.op == CONVOLUTION:
        least = 0
        source, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        numbers = [*_items(stride), *_items(padding), *_items(dilation), groups]
        if transposed is not False or len(_items(padding)) not in (1, 2) or not _are_numbers(numbers):
            return None
    elif node.op == "aten::mm.default":
        (source, weight), bias = node.args, None
    elif node.op == "aten::addmm.default":
        bias, source, weight = node.args
    else:
        return None
    if not isinstance(source, str) or not isinstance(weight, str) or weight not in constants or source in constants:
        return None
    if not _is_large(metas.get(weight), least):
        return None
    layer = Layer([source], weight, None, [node])
    if isinstance(bias, str):
        layer.bias = bias
    return layer if bias is None or _is_vector(bias, layer, metas, constants) else None


def _followed(
    layer: Layer,
    follower: Callable[[str], Node | None],
    metas: Mapping[str, ValueMeta],
    constants: Set[str],
    *,
    sums: bool,
) -> dict[str, str]:
    """Add what follows a layer to it; return these nodes, each with the value before it."""
    alias: dict[str, str] = {}
    root = layer.nodes[0]
    is_convolution, current = root.op == CONVOLUTION, root

    def add(node: Node) -> Node:
        layer.nodes.append(renamed(node, {current.name: layer.nodes[-1].name}))
        alias[node.name] = current.name
        return node

    while (node := follower(current.name)) is not None and layer.activation is None:
        if is_convolution and node.op == _NORM and len(layer.nodes) == 1:
            item = follower(node.name)
            affine = [each for each in node.args[1:5] if each is not None]
            if item is None or item.op != "python::getitem" or item.args[1] != 0 or not _are_numbers(node.args[5:]):
                break
            if not all(_is_vector(each, layer, metas, constants) for each in affine):
                break
            layer.norm = node
            current = add(node)
            current = add(item)
        elif node.op == _ADD and not node.kwargs and len(layer.inputs) == 1 and len(node.args) == 2:
            other = node.args[1 if node.args[0] == current.name else 0]
            if layer.bias is None and layer.norm is None and not is_convolution and _ends_alike(current, root):
                if not _is_vector(other, layer, metas, constants):
                    break
                layer.bias = str(other)
            elif (
                sums
                and is_convolution
                and isinstance(other, str)
                and other not in constants
                and metas.get(other) == root.meta
            ):
                layer.inputs.append(other)
            else:
                break
            current = add(node)
        elif node.op in ACTIVATIONS and node.args[0] == current.name and _are_numbers(node.args[1:]):
            if len(layer.inputs) > 1 and node.op != _AFTER_SUMS:
                break
            layer.activation = node
            current = add(node)
        elif node.op in VIEWS and node.op.endswith("view.default") and not is_convolution:
            current = node
        else:
            break
    return alias


def _ends_alike(value: Node, root: Node) -> bool:
    """Return whether rows of a value are those of `root`."""
    one, other = value.meta, root.meta
    return isinstance(one, TensorMeta) and isinstance(other, TensorMeta) and one.shape[-1:] == other.shape[-1:]


def _is_vector(name: object, layer: Layer, metas: Mapping[str, ValueMeta], constants: Set[str]) -> bool:
    """Return whether a value is a constant with one number per channel of a layer."""
    meta, weight = metas.get(str(name)), metas.get(layer.weight)
    if name not in constants or not isinstance(weight, TensorMeta) or not isinstance(meta, TensorMeta):
        return False
    channels = weight.shape[0 if layer.nodes[0].op == CONVOLUTION else -1]
    return meta.shape == (channels,) and is_float32(meta)


def _is_large(meta: object, least: int) -> bool:
    """Return whether a tensor has at least so many elements."""
    return isinstance(meta, TensorMeta) and math.prod(size for size in meta.shape if isinstance(size, int)) >= least


def is_float32(meta: object) -> bool:
    """Return whether a value is a tensor of float32 that a CPU had at capture."""
    return isinstance(meta, TensorMeta) and meta.dtype == "float32" and meta.device == "cpu"
