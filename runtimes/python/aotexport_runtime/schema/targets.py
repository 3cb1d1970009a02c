"""Targets: faster forms of functional graphs, for machines of one kind; their files are below `targets/<target>/`.

Kernels are compiled code for GPUs with all that a launch needs, in `targets/cuda/kernels/kernels.json`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from aotexport_runtime.schema import bounded
from aotexport_runtime.schema.bounded import AtMost, Code, Count, IndexOf, Line, OwnName, PlainName, Record, Unique
from aotexport_runtime.schema.graph import SourceLine
from aotexport_runtime.schema.sizes import Condition, Size
from aotexport_runtime.schema.values import DType

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
        inputs: names of the values of the functional graph that it takes, all tensors; `results`: that it returns.
        indexes: whether it indexes by data (17.3).
        written: tensors among `inputs` that the program changes, and whose new elements it writes (17.3).
    """

    file: PlainName
    inputs: Annotated[tuple[str, ...], Unique()]
    results: Annotated[tuple[str, ...], Unique()]
    indexes: bool = False
    written: Annotated[tuple[str, ...], Unique()] = ()


class CompiledProgram(Record, kw_only=True):
    """The functional graph of a program, compiled: whole, or its forward and backward.

    Attributes:
        partition: name of the joint graph's partition; None: an inference graph.
        guards: truths over the program's symbols that a call must satisfy; one that violates any runs the graph.
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


MAX_WARPS = 32
MAX_SHARED_NBYTES = (1 << 20) - 1
MAX_NBYTES = 1 << 30
"""Most bytes of a pack, and of scratch memory per block."""

Alignment = Annotated[bounded.Positive, bounded.Code("kernel-malformed"), bounded.AtMost(1 << 16, "kernel-malformed")]
NumberType = Literal["i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64"]


class PointerParameter(Record, kw_only=True, tag="pointer", tag_field="kind"):
    """A parameter that takes the address of a tensor's first element, a multiple of `alignment` bytes."""

    name: bounded.KernelName
    dtype: DType
    alignment: Alignment = 1


class NumberParameter(Record, kw_only=True, tag="number", tag_field="kind"):
    """A parameter that takes a number.

    Attributes:
        type: how the number is passed: `i` signed, `u` unsigned, `fp` and `bf` floating, with the width in bits.
        multiple_of: divisor of the number that the code assumes.
    """

    name: bounded.KernelName
    type: NumberType
    multiple_of: Alignment = 1


KernelParameter = PointerParameter | NumberParameter


class KernelBinary(Record, kw_only=True):
    """Compiled code of a candidate for one architecture.

    Attributes:
        architecture: `sm_80`, ...: machine code of that architecture; `ptx`: text that a driver compiles.
        offset: where it begins in the uncompressed pack of its architecture, in bytes.
        shared_nbytes: dynamic shared memory that a launch asks for.
        global_scratch_nbytes: scratch memory per block of threads.
        global_scratch_alignment: divisor of its address, in bytes.
    """

    architecture: Annotated[str, bounded.NameOf("KernelLibrary.packs.architecture")]
    offset: Annotated[bounded.Count, bounded.Code("kernel-malformed")]
    nbytes: Annotated[bounded.Positive, bounded.Code("kernel-malformed")]
    sha256: Annotated[bounded.Digest, bounded.Code("kernel-malformed")]
    shared_nbytes: Annotated[bounded.Count, bounded.AtMost(MAX_SHARED_NBYTES)] = 0
    global_scratch_nbytes: Annotated[bounded.Count, bounded.AtMost(MAX_NBYTES)] = 0
    global_scratch_alignment: Alignment = 1


class KernelConstant(Record, kw_only=True):
    """A parameter of the source that is fixed in compiled code."""

    name: bounded.KernelName
    value: bool | int | float | str | None


class KernelCandidate(Record, kw_only=True):
    """One way to compile a kernel; all compute the same.

    Attributes:
        num_warps: warps of 32 threads per block.
        num_stages: depth of software pipelines.
        grid: blocks per axis, of three, over the arguments of the launch that are integers.
        cooperative: whether all blocks must run at once.
    """

    constants: tuple[KernelConstant, ...] = ()
    num_warps: Annotated[
        bounded.Positive, bounded.Code("kernel-malformed"), bounded.AtMost(MAX_WARPS, "kernel-malformed")
    ]
    num_stages: int
    grid: tuple[Size, Size, Size]
    cooperative: bool = False
    binaries: Annotated[tuple[KernelBinary, ...], bounded.Unique("architecture")] = ()


class Kernel(Record, kw_only=True):
    """A kernel; a node of a lowered graph launches it by the operator `kernel::<name>`, its arguments by keyword.

    Attributes:
        name: also that of the entry point in compiled code.
        source: file with its source in Triton, relative to the directory of this record; None: not kept.
        grid_arguments: further arguments of a launch, integers, which only the grid depends on.
        candidates: the first is the default.
        operators: names of the operators that were fused in it, without overloads; for people.
        lines: lines of the user's code that they came from; for people.
    """

    name: bounded.KernelName
    source: bounded.FilePath | None = None
    parameters: tuple[KernelParameter, ...]
    grid_arguments: tuple[bounded.KernelName, ...] = ()
    candidates: Annotated[tuple[KernelCandidate, ...], bounded.Bounds(minItems=1, code="kernel-malformed")]
    operators: tuple[bounded.Line, ...] = ()
    lines: tuple[SourceLine, ...] = ()


class KernelPack(Record, kw_only=True):
    """Compiled code of all kernels for one architecture, one after the other.

    Attributes:
        file: its bytes compressed by zlib; relative to the directory of this record.
        nbytes: size of the uncompressed bytes.
    """

    architecture: bounded.Architecture
    file: bounded.FilePath
    nbytes: Annotated[bounded.Count, bounded.AtMost(MAX_NBYTES)]


class KernelLibrary(Record, kw_only=True):
    """The kernels of a target, sorted by name, and their packs per architecture; `compiler` is for people."""

    compiler: bounded.Line
    packs: Annotated[tuple[KernelPack, ...], bounded.Unique("architecture")]
    kernels: Annotated[tuple[Kernel, ...], bounded.Unique("name")]
