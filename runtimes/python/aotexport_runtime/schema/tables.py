"""Tables of a graph: in a file, what its inputs and nodes share stands there once, and indexes in its place.

In memory each input and node has its own, and the tables are empty: nothing but this file knows of indexes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.limits import Limits

_USERS = {"metas": (("inputs", "meta"), ("nodes", "meta")), "operators": (("nodes", "op"),)}
"""Per table the fields that may be indexes into it; its entries are in the order in which these use them first."""


def resolve_tables(graph: Graph, where: Place, limits: Limits) -> None:
    """Put the entries of its tables in the place of indexes, in a graph that was just decoded and in its bodies.

    Args:
        graph: changed in place.
        where: its place, for errors.
        limits: how large a file may be, with what tables hold in the place of indexes.

    Raises:
        BundleInvalid: an index is out of range, or the file would be too large.
    """
    nbytes = containers = 0
    for part, place in _with_bodies(graph, where):
        for table in _USERS:
            entries = getattr(part, table)
            uses = _resolve(part, table, entries, place)
            force_setattr(part, table, ())
            for entry, count in zip(entries, uses, strict=True):
                text = msgspec.json.encode(entry)
                nbytes += len(text) * count
                containers += (text.count(b"{") + text.count(b"[")) * count
    if nbytes > limits.json_nbytes or containers > limits.json_containers:
        raise where.invalid(
            "with what its tables hold in the place of indexes it is larger than what is read of a file", "bundle-limit"
        )


def share_in_tables(graph: Graph) -> None:
    """Put what inputs and nodes of a graph, and of its bodies, have into tables, and indexes in its place.

    Args:
        graph: changed in place; without indexes.
    """
    for part, _ in _with_bodies(graph, Place("")):
        for table in _USERS:
            # As text: 1 and 1.0 are equal, and not the same.
            entries: dict[bytes, Any] = {}
            indexes: dict[bytes, int] = {}
            for _, field, value in _values(part, table):
                entry = getattr(value, field)
                text = msgspec.json.encode(entry)
                entries.setdefault(text, entry)
                force_setattr(value, field, indexes.setdefault(text, len(indexes)))
            force_setattr(part, table, tuple(entries.values()))


def _resolve(graph: Graph, table: str, entries: tuple[Any, ...], where: Place) -> list[int]:
    """Put the entries of a table in the place of indexes; return how often each was used."""
    uses = [0] * len(entries)
    for steps, field, value in _values(graph, table):
        index = getattr(value, field)
        if not isinstance(index, int):
            continue
        if not 0 <= index < len(entries):
            raise where.at(*steps, field).invalid(
                f"index {index} into `{table}` is out of range({len(entries)})", "index-range"
            )
        force_setattr(value, field, entries[index])
        uses[index] += 1
    return uses


def _values(graph: Graph, table: str) -> Iterator[tuple[tuple[str, int], str, Any]]:
    """Yield inputs and nodes that may have an index into a table, each with its path and the field that has it."""
    for kind, field in _USERS[table]:
        for index, value in enumerate(getattr(graph, kind)):
            yield (kind, index), field, value


def _with_bodies(graph: Graph, where: Place) -> Iterator[tuple[Graph, Place]]:
    yield graph, where
    for name, body in graph.subgraphs.items():
        yield from _with_bodies(body, where.at("subgraphs", name))
