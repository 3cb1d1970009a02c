"""What a bundle may ask of a process before it is refused; the caller of `load` may give stricter limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that reading and running a bundle takes; what is beyond is refused before the work is done.

    The defaults are far above what models have: a graph of 100,000 nodes passes. A host that loads bundles of strangers
    gives limits that fit its machine.

    Attributes:
        bundle_nbytes: all files of the manifest together.
        json_nbytes: a JSON file.
        json_depth: levels of lists and objects in a JSON file.
        json_containers: lists and objects of a JSON file; decoded, each takes some 64 bytes, and a node has 8 to 16.
        json_values: values of any kind of a JSON file.
        nodes: nodes of a graph and its subgraphs.
        number_nbits: bits of the numbers that a graph computes from sizes.
        results: values in the list that an operator returns.
        allocation_nbytes: values of a graph that are alive at once, and each tensor that is made of literal sizes.
        iterations: steps of one loop of a graph.
        calls: operators that one call of a program runs in bodies: of branches, loops and parts, nested or not.
    """

    bundle_nbytes: int = 1 << 42
    json_nbytes: int = 1 << 30
    json_depth: int = 64
    json_containers: int = 1 << 23
    json_values: int = 1 << 24
    nodes: int = 1_000_000
    number_nbits: int = 1024
    results: int = 1 << 20
    allocation_nbytes: int = 1 << 44
    iterations: int = 1_000_000
    calls: int = 100_000_000


DEFAULT = Limits()
