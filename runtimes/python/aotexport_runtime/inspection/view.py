"""The graphs of a bundle as files of viewers: Model Explorer, whose layers open, Graphviz and Netron. No torch.

Source: ai-edge-model-explorer 0.1.34, `graph_builder.py`; netron 9.3, `dot.js`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import printable
from aotexport_runtime.execution.source import origin_of
from aotexport_runtime.module.describe import describe_meta, describe_node, graph_files
from aotexport_runtime.rewrite.names import names_in, operands
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.validate.arguments import descendants
from aotexport_runtime.validate.trees import taken_apart


def graphs_of(bundle: Bundle, names: Sequence[str]) -> dict[str, Any]:
    """Return the graphs of some programs, the functional graph of each before the forward graph."""
    graphs = [
        {"id": f"{name}/{file}", "nodes": list(_nodes(bundle.program(name), bundle.graph(name, file)))}
        for name in names
        for file in reversed(graph_files(bundle.program(name)))
    ]
    return {"label": printable(bundle.manifest.name), "graphs": graphs}


def dot_of(bundle: Bundle, name: str, depth: int | None) -> str:
    """Return the forward graph of a program in the language of Graphviz, its labels as Netron takes them apart.

    `depth`: modules at this depth are one node each; None: every operator is one.
    """
    program = bundle.program(name)
    nodes = list(_nodes(program, bundle.graph(name, program.forward.file)))
    places = {node["id"]: _folded(node, depth) for node in nodes}
    lines = {
        place: _dot_node(place, node, folded=place != node["id"]) for node in nodes for place in (places[node["id"]],)
    }
    edges = {
        (places[edge["sourceNodeId"]], places[node["id"]]): None for node in nodes for edge in node["incomingEdges"]
    }
    shown = [f"  {_quoted(one)} -> {_quoted(other)};" for one, other in edges if one != other]
    return "\n".join([f"digraph {_quoted(name)} {{", "  node [shape=record];", *lines.values(), *shown, "}", ""])


def _folded(node: dict[str, Any], depth: int | None) -> str:
    modules = node["namespace"].split("/") if node["namespace"] else []
    return node["id"] if depth is None or len(modules) < depth else f"module:{'.'.join(modules[:depth])}"


def _dot_node(place: str, node: dict[str, Any], *, folded: bool) -> str:
    label, facts = (place.partition(":")[2], []) if folded else (node["label"], [("module", node["namespace"])])
    facts += [("type", each["attrs"][0]["value"]) for each in node["outputsMetadata"] if not folded]
    said = "".join(f"{key}: {_escaped(value)}\\l" for key, value in facts if value)
    return f'  {_quoted(place)} [label="{{{_escaped(place)}|op_code=call_function\\l|{_escaped(label)}\\l{said}}}"];'


def _escaped(text: str) -> str:
    """Return a text for a label of a record, where some characters part fields."""
    return re.sub(r'([\\"{}|<>])', r"\\\1", text)


def _quoted(text: str) -> str:
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def _nodes(program: Program, graph: Graph) -> Iterator[dict[str, Any]]:
    """Yield inputs, operators and outputs; what is computed of gradients is in a layer `backward`."""
    names = {dimension.symbol: dimension.name for dimension in program.dimensions}
    specs = taken_apart(program).inputs if len(graph.inputs) > len(program.inputs) else program.inputs
    tangents = {value.name for value in graph.inputs[len(specs) :]}
    for place, value in enumerate(graph.inputs):
        spec = specs[place] if place < len(specs) else None
        label = "gradient" if spec is None else spec.path if isinstance(spec, ArgumentInput | SizeInput) else spec.name
        owner = "" if spec is None or isinstance(spec, ArgumentInput | SizeInput) else label.rpartition(".")[0]
        yield _node(value.name, label, owner, [], [describe_meta(value.meta, names)], {})
    backward = descendants(graph.nodes, tangents)
    for node in graph.nodes:
        owner = origin_of(node, graph).module or ""
        owner = f"backward.{owner}".rstrip(".") if tangents and node.name in backward else owner
        call = {"call": describe_node(node, graph, names)}
        label = node.op.removeprefix("aten::")
        yield _node(node.name, label, owner, operands(node), [describe_meta(node.meta, names)], call)
    for index, output in enumerate(graph.outputs):
        if taken := names_in([output]):
            # There are as many gradients as parameters: side by side with the modules they hide these.
            owner = "backward.gradients" if tangents and not backward.isdisjoint(taken) else ""
            yield _node(f"output {index}", f"output {index}", owner, taken, [], {})


def _node(
    name: str, label: str, owner: str, taken: list[str], results: list[str], facts: dict[str, str]
) -> dict[str, Any]:
    return {
        "id": name,
        "label": printable(label),
        "namespace": printable(owner.replace(".", "/")),
        "attrs": [{"key": key, "value": printable(value)} for key, value in facts.items()],
        "incomingEdges": [
            {"sourceNodeId": other, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, other in enumerate(taken)
        ],
        "outputsMetadata": [
            {"id": str(place), "attrs": [{"key": "type", "value": printable(result)}]}
            for place, result in enumerate(results)
        ],
    }
