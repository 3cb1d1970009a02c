"""A joint graph as the forward and backward that one pattern of needed gradients asks for. No torch.

A partition names the values that are saved in between; what is computed follows by reachability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from aotexport_runtime.rewrite.names import CHECK, names_in, operands, rename, renamed
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FunctionalGraph, Partition
from aotexport_runtime.schema.values import Argument, DeviceArgument, DTypeArgument, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import descendants, references
from aotexport_runtime.validate.program import returned_count as forward_returns


@dataclass(frozen=True)
class Subgraph:
    """A piece of a graph: named inputs, nodes in order, returned arguments."""

    inputs: list[str]
    nodes: list[Node]
    outputs: list[Argument]


@dataclass(frozen=True)
class PartitionedGraph:
    """Forward and backward for one set of needed gradients.

    Attributes:
        forward: inputs are the program's; outputs the forward returns, then the saved values.
        backward: inputs are the saved values, then one tangent per `Gradients.tangents`; outputs one gradient per
            program input, None where it is not needed or statically undefined.
        saved_tensors: how many saved values are tensors whose version is checked; they come first.
        saved_unchecked: how many tensors without a version check follow.
        saved_others: how many numbers, and inputs without a version check, come last.
        reaching: per tangent, whether its output requires grad: a needed gradient comes through it.
    """

    forward: Subgraph
    backward: Subgraph
    saved_tensors: int
    saved_unchecked: int
    saved_others: int
    reaching: tuple[bool, ...]


def partition_graph(
    graph: Graph, functional: FunctionalGraph, partition: Partition, needed: Sequence[bool], impure: set[str]
) -> PartitionedGraph:
    """Return the forward and backward of a joint graph.

    `needed`: per program input, whether its gradient is wanted. `impure`: nodes that run even when nothing uses them.
    Backward runs those that check the path through the code, and others that depend on tangents if it computes their
    operands.
    """
    gradients = functional.gradients
    assert gradients is not None
    inputs = [graph_input.name for graph_input in graph.inputs]
    primals, tangents = inputs[: len(needed)], inputs[len(needed) :]
    returned = graph.outputs[: forward_returns(functional)]
    wanted: list[Argument] = [
        graph.outputs[index] if index is not None and wants else None
        for index, wants in zip(gradients.of_inputs, needed, strict=True)
    ]

    boundary = {*partition.saved, *primals, *tangents}
    backward_effects = impure & descendants(graph.nodes, set(tangents))
    backward_nodes, reached = ancestors(graph.nodes, wanted, boundary, also=set())
    checks = _checks(graph, backward_nodes, boundary, backward_effects)
    backward_nodes, read = ancestors(graph.nodes, wanted, boundary, also=checks)
    saved, counts = _ordered(read - set(tangents), graph, partition)

    # If all gradients of the capture are wanted, the outputs that required grad there require it here. A gradient that
    # is the same for every tangent (zeros, as of a sign) comes through any of them.
    complete = all(wants or index is None for index, wants in zip(gradients.of_inputs, needed, strict=True))
    derived = descendants(backward_nodes, set(tangents))
    constant = any(isinstance(gradient, str) and gradient not in derived for gradient in wanted)

    results = [*returned, *saved]
    forward_nodes, _ = ancestors(graph.nodes, results, {*primals, *tangents}, also=impure - backward_effects)
    return PartitionedGraph(
        forward=Subgraph(primals, forward_nodes, results),
        backward=Subgraph([*saved, *tangents], backward_nodes, wanted),
        saved_tensors=counts[0],
        saved_unchecked=counts[1],
        saved_others=counts[2],
        reaching=tuple(complete or constant or name in reached for name in tangents),
    )


def _ordered(names: set[str], graph: Graph, partition: Partition) -> tuple[list[str], tuple[int, int, int]]:
    """Return saved values: checked tensors, unchecked tensors, numbers and unchecked inputs; and how many of each."""
    own = {value.name for value in graph.inputs}
    # An unchecked input is saved as the very tensor object, which may get other memory (`.data = `).
    loose = {name: 2 if name in own else 1 for name in partition.unchecked}
    kinds = {
        value.name: loose.get(value.name, 0) if isinstance(value.meta, TensorMeta) else 2
        for value in (*graph.inputs, *graph.nodes)
        if value.name in names
    }
    counts = Counter(kinds.values())
    return sorted(kinds, key=kinds.__getitem__), (counts[0], counts[1], counts[2])


def ancestors(
    nodes: Sequence[Node], roots: Iterable[Argument], boundary: Set[str], also: Set[str]
) -> tuple[list[Node], set[str]]:
    """Return the nodes that compute `roots` and `also` from `boundary`, and the boundary values that they use."""
    wanted = {*names_in(roots), *also}
    found: list[Node] = []
    for node in reversed(nodes):
        if node.name in wanted and node.name not in boundary:
            found.append(node)
            wanted.update(operands(node))
    return found[::-1], wanted & boundary


def _checks(graph: Graph, nodes: Sequence[Node], boundary: set[str], effects: set[str]) -> set[str]:
    """Return those of `effects`, nodes whose results nothing uses: checks, and those whose operands `nodes` compute."""
    computed = {node.name for node in nodes}
    found = {node.name for node in graph.nodes if node.name in effects and node.op == CHECK}
    for effect in effects - found:
        computing, _ = ancestors(graph.nodes, [], boundary, also={effect})
        others = (node.name for node in computing if node.op != "python::getitem" and node.name != effect)
        if computed.issuperset(others):
            found.add(effect)
    return found


def reached_in_part(graph: Graph, functional: FunctionalGraph) -> list[int]:
    """Return the inputs of a joint graph whose gradient comes from some of the outputs alone."""
    if functional.gradients is None:
        return []
    of_inputs = functional.gradients.of_inputs
    # Per value a bit for each tangent that it is computed from.
    sources = {value.name: 1 << index for index, value in enumerate(graph.inputs[len(of_inputs) :])}
    every = (1 << len(sources)) - 1
    for node in graph.nodes:
        bits = 0
        for name in operands(node):
            bits |= sources.get(name, 0)
        if bits:
            sources[node.name] = bits
    gradients = [(i, graph.outputs[at]) for i, at in enumerate(of_inputs) if at is not None]
    return [i for i, gradient in gradients if isinstance(gradient, str) and sources.get(gradient, every) != every]


def with_tangents(graph: Graph, backward: Subgraph, defined: Sequence[bool]) -> Subgraph:
    """Return `backward` for a call in which some tangents are undefined.

    Backward is linear in tangents: what is computed from undefined ones alone is undefined, an undefined gradient is
    None, a sum with one undefined term is the other. Where another operator needs an undefined tensor, it gets zeros.
    """
    if all(defined):
        return backward
    tangents = backward.inputs[len(backward.inputs) - len(defined) :]
    undefined = {name for name, is_defined in zip(tangents, defined, strict=True) if not is_defined}
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    derived = descendants(backward.nodes, set(tangents))
    missing = set(undefined)
    alias: dict[str, str] = {}
    nodes: list[Node] = []
    zeros: dict[str, Node] = {}
    for node in backward.nodes:
        names = {alias.get(name, name) for name in operands(node)}
        gone = names & missing
        # The other term of a sum may be the same for every tangent (zeros, as of a sign); it is a gradient too.
        if gone and (term := _other_term(node, missing, alias, metas)) is not None:
            alias[node.name] = term
            derived.add(term)
            continue
        if gone and not (names & derived) - missing:
            missing.add(node.name)
            continue
        for name in sorted(gone):
            if name not in zeros:
                zeros[name] = _zeros(f"{name}.zeros", metas[name])
                nodes.append(zeros[name])
        renames = {**alias, **{name: zeros[name].name for name in gone}}
        nodes.append(renamed(node, renames) if renames else node)
    outputs: list[Argument] = []
    for output in backward.outputs:
        output = rename(output, alias)
        outputs.append(None if missing.intersection(names_in([output])) else output)
    return Subgraph(backward.inputs, nodes, outputs)


def _other_term(node: Node, missing: set[str], alias: dict[str, str], metas: dict[str, ValueMeta]) -> str | None:
    """Return the defined term of a two-term sum of equal tensors, if `node` is one."""
    if node.op != "aten::add.Tensor" or node.kwargs or len(node.args) != 2:
        return None
    terms = [alias.get(argument, argument) for argument in node.args if isinstance(argument, str)]
    defined = [term for term in terms if term not in missing]
    if len(terms) != 2 or len(defined) != 1:
        return None
    term, whole = metas.get(defined[0]), node.meta
    if not isinstance(term, TensorMeta) or not isinstance(whole, TensorMeta):
        return None
    return defined[0] if (term.shape, term.dtype) == (whole.shape, whole.dtype) else None


def _zeros(name: str, meta: ValueMeta) -> Node:
    assert isinstance(meta, TensorMeta)
    shape: list[Argument] = [size if isinstance(size, int) else SizeArgument(value=size) for size in meta.shape]
    kwargs: dict[str, Argument] = {"dtype": DTypeArgument(value=meta.dtype), "device": DeviceArgument(type=meta.device)}
    return Node(name=name, op="aten::zeros.default", args=[shape], kwargs=kwargs, meta=meta)


def views_recomputed(graph: Graph, functional: FunctionalGraph, partition: Partition) -> Partition:
    """Return `partition` with views replaced by their bases, whose versions tell of changes.

    Backward makes the view anew, or needs none: the transpose of a transposed weight is the weight. Views of inputs
    that the graph changes are saved themselves, since the base has other values in backward.
    """
    nodes = {node.name: node for node in graph.nodes}
    mutated = {graph.inputs[mutation.input_index].name for mutation in functional.mutations}
    bases: set[str] = set()
    checked: set[str] = set()
    for name in partition.saved:
        base = name
        while base in nodes and nodes[base].op in VIEWS:
            source = nodes[base].args[0]
            if not isinstance(source, str) or source in mutated:
                break
            # Sizes of the view may be those of other tensors.
            bases.update(name for argument in nodes[base].args[1:] for name in references(argument))
            base = source
        bases.add(base)
        if name not in partition.unchecked:
            checked.add(base)
    saved = tuple(value.name for value in (*graph.inputs, *graph.nodes) if value.name in bases)
    unchecked = tuple(name for name in saved if name not in checked)
    return Partition(name="views-recomputed", saved=saved, unchecked=unchecked)


def base_of(graph: Graph, name: str) -> str:
    """Return the base of a value of `graph`, whose memory and version it has; itself, where it is no view."""
    nodes = {node.name: node for node in graph.nodes}
    while name in nodes and nodes[name].op in VIEWS and isinstance(source := nodes[name].args[0], str):
        name = source
    return name


VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "t.default", "transpose.int", "unsqueeze.default"),
        *("view.default", "_unsafe_view.default"),
    )
)
