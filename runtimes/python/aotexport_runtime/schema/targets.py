"""Targets: faster forms of functional graphs, for machines of one kind; their files are below `targets/<target>/`."""

from __future__ import annotations

from typing import Annotated, Literal

from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.bounded import AtMost, Code, Count, IndexOf, Line, OwnName, PlainName, Unique
from aotexport_runtime.schema.sizes import Condition

MAX_SAVED = 1_000_000


class LoweredProgram(Record, kw_only=True):
    """The whole of `targets/<target>/programs/<program>/lowered.json`: graphs that stand in for the functional graph.

    The calling convention (mutations, outputs, gradients, tangents) is that of `Program.functional`.

    Attributes:
        forward: graph file, relative to this record. Its inputs are the program's; its outputs the functional graph's
            results before gradients, then the saved tensors.
        backward: graph file. Its inputs are the saved tensors, then one per tangent; its outputs one per input of the
            program: its gradient, or null where the functional graph has none. None: an inference program.
        saved: how many tensors the forward saves for the backward.
        guards: truths over the symbols that only the lowered form assumes.
    """

    forward: PlainName
    backward: PlainName | None = None
    saved: Annotated[Count, AtMost(MAX_SAVED)] = 0
    guards: tuple[Condition, ...] = ()


class CpuRequirements(Record, kw_only=True, tag="cpu", tag_field="kind"):
    """Requirements of the shared libraries of a `cpu` target.

    Attributes:
        level: level of the x86-64 instruction set that they are compiled for.
        torch: release series of torch (`2.13`) whose libraries they are linked with.
    """

    level: Literal["x86_64-v3", "x86_64-v4"]
    torch: Line


class CompiledHalf(Record, kw_only=True):
    """A subgraph of a functional graph, compiled: the whole, its forward or its backward.

    Attributes:
        file: the shared library; a plain name, in the directory of the target.
        inputs: names of the values of the functional graph that it takes, all tensors, in order.
        results: names of the values that it returns, all tensors, in order.
        indexes: whether it indexes by data (17.3).
    """

    file: PlainName
    inputs: Annotated[tuple[str, ...], Unique()]
    results: Annotated[tuple[str, ...], Unique()]
    indexes: bool = False


class CompiledProgram(Record, kw_only=True):
    """The functional graph of a program, compiled: whole, or its forward and backward.

    Attributes:
        program: name of the program.
        partition: name of the joint graph's partition; None: an inference graph.
        guards: truths over the program's symbols that a call must satisfy; one that violates any runs the graph.
        forward: the forward of a joint graph, or an inference graph.
        backward: for calls in which every gradient is wanted, and all tangents but `undefined_tangents` are defined.
        undefined_tangents: indices into `Gradients.tangents`, of outputs that a training step takes no gradient of.
    """

    program: PlainName
    partition: str | None = None
    guards: tuple[Condition, ...] = ()
    forward: CompiledHalf
    backward: CompiledHalf | None = None
    undefined_tangents: Annotated[
        tuple[Annotated[Count, IndexOf("Gradients.tangents", code="target-malformed")], ...], Unique()
    ] = ()


class TargetRefusal(Record, kw_only=True):
    """Why a target lacks a program, in a sentence or two; for people."""

    program: PlainName
    reason: Line


class Target(Record, kw_only=True):
    """The whole of `targets/<name>/target.json`: the programs that it has and those that it lacks."""

    name: Annotated[OwnName, Code("target-malformed")]
    requirements: CpuRequirements
    programs: tuple[CompiledProgram, ...] = ()
    refusals: tuple[TargetRefusal, ...] = ()
