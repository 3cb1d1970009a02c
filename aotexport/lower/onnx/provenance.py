"""Provenance of nodes: operator, module and line of the user, as a traceback that torch's exporters keep."""

from __future__ import annotations

from aotexport_runtime.schema.graph import Graph, Node


def location(graph: Graph, node: Node) -> str:
    """Return the user's line of `node`, `model.py:12`; empty: unknown."""
    if node.source is None:
        return ""
    line = graph.sources[node.source]
    return f"{line.file}:{line.line}"


def where(graph: Graph, node: Node) -> str:
    """Return ` (model.py:12)`, or nothing."""
    found = location(graph, node)
    return f" ({found})" if found else ""


def trace(graph: Graph, node: Node) -> str:
    """Return the user's line in the form of a traceback, which torch's exporters keep."""
    module = f", in {graph.modules[node.module]}" if node.module is not None else ""
    if node.source is None:
        return f"  {node.op}{module}"
    line = graph.sources[node.source]
    return f'  File "{line.file}", line {line.line}, in {line.function}\n    {node.op}{module}'


def origin(text: str | None) -> tuple[str, str]:
    """Return operator and ` (model.py:12)` of what `trace` wrote; each empty if it is unknown."""
    found = provenance(text)
    return found.get("operator", ""), f" ({found['source']})" if "source" in found else ""


def provenance(text: str | None) -> dict[str, str]:
    """Return the facts that `trace` wrote: user's `source` line, `operator`, `module`, as far as they are known."""
    lines = [line for line in (text or "").splitlines() if line.strip()]
    if not lines or "::" not in lines[-1]:
        return {}
    operator, _, module = lines[-1].strip().partition(", in ")
    found = {"operator": operator}
    if module:
        found["module"] = module
    if len(lines) > 1 and lines[-2].strip().startswith('File "'):
        file, line, _ = lines[-2].strip().removeprefix('File "').split(", ", 2)
        found["source"] = f"{file[:-1]}:{line.removeprefix('line ')}"
    return found
