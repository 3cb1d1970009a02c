"""Which engine runs a program: rules, each with its reason in words. No torch.

Every engine that a bundle has for a program serves it, unless a rule rules it out. The reason is that of the first rule
that does; `explain`, `inspect` and the log show it. Each serving engine takes the calls that the ones before it do not;
the forward graph under autograd is the last, and takes every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import AUTOGRAD, CUDA, PORTABLE, Request, is_native, is_of
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.matmul.sizes import Matmul, is_worth_choosing, matmuls_of
from aotexport_runtime.rewrite.reuse import IN_PLACE
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import SequenceMeta, TensorMeta, ValueMeta

ENGINES = {
    "cpu": "the functional graphs as shared libraries, where the bundle has them; needs trust='native'",
    PORTABLE: "the functional graphs as operator calls of torch, on any device",
    AUTOGRAD: "the forward graph under eager autograd; the reference",
    CUDA: "precompiled kernels for NVIDIA GPUs; needs trust='native'",
    "onnx": "ONNX models of programs that record no gradients, through ONNX Runtime, without torch",
    "openvino": "the same ONNX models through OpenVINO, without torch",
}
"""Targets of `load`, beside `auto` and compiled targets by name."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which engines serve.

    Attributes:
        engines: their names; each takes the calls that the ones before it do not.
        why_not: why others do not serve, by name.
        because: why the functional graph serves where the forward graph could; empty: it does not, or was asked for.
    """

    engines: tuple[str, ...] = ()
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])
    because: str = ""

    @property
    def native(self) -> str | None:
        """The first engine of native code that serves; None: none does."""
        return next(filter(is_native, self.engines), None)


NO_TARGETS = Choice()
"""No native code may run; no reasons are given."""


def select_targets(
    bundle: Bundle, request: Request, *, device: str | None, why_unfit: Callable[[str], str | None]
) -> Choice:
    """Return the engines of native code that a loaded bundle may run its programs by.

    `device`: type of the device that the bundle is loaded to; None: where it was captured. `why_unfit` says why this
    machine cannot run libraries of a compiled target; None: it can.

    Raises:
        NotSupported: the requested one cannot run; says why.
    """
    # The highest level first: names end with the level.
    compiled = [name for name in reversed(bundle.target_names) if name.startswith("cpu-")]
    serving: list[str] = []
    why_not: dict[str, str] = {}
    for engine in (CUDA, *compiled):
        reason = next(_against_target(engine, bundle, request, serving, device, why_unfit), None)
        if reason is None:
            serving.append(engine)
        else:
            why_not[engine] = reason
    found, target = Choice(engines=tuple(serving), why_not=why_not), request.target
    if is_native(target) and not any(is_of(engine, target) for engine in serving):
        if target == CUDA:
            raise NotSupported(why_not[CUDA])
        has = ", ".join((PORTABLE, *bundle.target_names))
        raise NotSupported(f"target `{target}` cannot run here: the bundle has {has}{passed_over(found, target)}")
    return found


def select_engine(
    bundle: Bundle,
    program: Program,
    request: Request,
    *,
    targets: Choice = NO_TARGETS,
    device: str | None = None,
    changed: str = "",
    failed: Mapping[str, str] = MappingProxyType({}),
    is_measured: bool = False,
    prefers_onednn: Callable[[Matmul], bool] | None = None,
) -> Choice:
    """Return the engines that serve `program`.

    Args:
        bundle: an open bundle.
        program: its record.
        request: arguments of `load`.
        targets: the result of `select_targets`.
        device: type of the device that the bundle is on; None: where it was captured.
        changed: how submodules that the program calls differ from those that were exported; empty: they do not.
        failed: why an engine that was chosen before could not be prepared, by name.
        is_measured: whether libraries are to be measured, so that recorded figures say nothing against them.
        prefers_onednn: says whether oneDNN computes a matmul clearly faster on this machine; None: nobody knows.
    """
    serving: list[str] = []
    why_not, because = dict(targets.why_not), ""
    for engine in (*targets.engines, PORTABLE):
        reason = next(_against(engine, bundle, program, request, device, changed, failed), None)
        # Recorded figures say nothing of kernels, of what was asked for, and of what is measured or chosen already.
        passes = engine == CUDA or is_measured if engine != PORTABLE else any(map(is_native, serving))
        if reason is None and request.target == "auto" and not _exceeds_budget(program, request) and not passes:
            reason, because = _by_figures(engine, bundle, program, prefers_onednn)
        if reason is None:
            serving.append(engine)
        else:
            why_not[engine] = reason
    return Choice(engines=(*serving, AUTOGRAD), why_not=why_not, because=because)


def _exceeds_budget(program: Program, request: Request) -> bool:
    """Return whether a memory budget asks for values that backward recomputes."""
    return request.memory_budget < 1 and program.grad


def _against_target(
    engine: str,
    bundle: Bundle,
    request: Request,
    serving: list[str],
    device: str | None,
    why_unfit: Callable[[str], str | None],
) -> Iterator[str]:
    """Yield why native code of a bundle may not run: the caller does not want it, or this machine cannot run it."""
    if engine == CUDA and not any(CUDA in entry.targets for entry in bundle.manifest.programs):
        yield "the bundle has no kernels. Export it with `--target cuda`"
    if request.target != "auto" and not is_of(engine, request.target):
        yield f"target `{request.target}` was asked for"
    if engine == CUDA:
        if request.trust != "native":
            yield "kernels are native code, which runs only with `trust='native'`"
        return
    if request.trust != "native":
        yield "it holds native code, and was loaded without trust='native'"
    if device not in (None, "cpu"):
        yield f"it is for processors, and was loaded to {device}"
    if not bundle.target(engine).programs:
        yield "it has none of the programs"
    if (reason := why_unfit(engine)) is not None:
        yield reason
    yield from (f"{higher} was chosen" for higher in serving if higher != CUDA)


def _against(
    engine: str,
    bundle: Bundle,
    program: Program,
    request: Request,
    device: str | None,
    changed: str,
    failed: Mapping[str, str],
) -> Iterator[str]:
    """Yield why an engine does not serve a program."""
    if changed:
        yield changed
    if engine in (CUDA, PORTABLE) and program.functional is None:
        yield "; ".join(refusal.reason for refusal in program.refusals)
    is_other = request.target != "auto" and not is_of(engine, request.target)
    if request.target == AUTOGRAD if engine == PORTABLE else is_other:
        yield f"target `{request.target}` was asked for"
    if engine == CUDA and _exceeds_budget(program, request):
        yield "they save more for backward than the memory budget"
    if engine not in (CUDA, PORTABLE):
        if device not in (None, "cpu"):
            yield f"it is for processors, and the bundle is on {device}"
        if _exceeds_budget(program, request):
            yield f"it saves more for backward than the memory budget of {request.memory_budget:g}"
        if bundle.compiled(engine, program.name) is None:
            refusals = {refusal.program: refusal.reason for refusal in bundle.target(engine).refusals}
            yield refusals.get(program.name, "it has none of this program")
    if engine in failed:
        yield failed[engine]
    if engine == PORTABLE and device == "cpu" and program.functional is not None:
        operators = {node.op for node in bundle.graph(program.name, program.functional.file).nodes}
        if any(op.startswith("aten::_scaled_dot_product_") and "_cpu" not in op for op in operators):
            yield "it has the fused attention of GPUs, and the bundle is on cpu"


def _by_figures(
    engine: str, bundle: Bundle, program: Program, prefers_onednn: Callable[[Matmul], bool] | None
) -> tuple[str | None, str]:
    """Return why the forward graph is faster than a library or the functional graph, else None and why it is not."""
    assert program.functional is not None
    if not program.grad and 2 * len(program.functional.mutations) > len(program.inputs):
        # As training steps do, which libraries write in place too.
        if engine == PORTABLE:
            return "the other graph writes most of what it reads, and in place", ""
        names = [_name(node.op) for node in bundle.graph(program.name, program.functional.file).nodes]
        convolves = 2 * names.count("convolution") > sum(name in _CONTRACTIONS for name in names)
        return (
            "most of its products are convolutions, which libraries make no faster in a step" if convolves else None,
            "",
        )
    files = program.forward.file, program.functional.file
    forward, functional = (bundle.graph(program.name, file) for file in files)
    if engine == PORTABLE:
        graph, reason = _faster_graph(program, forward, functional, prefers_onednn)
        return (None, reason) if graph == PORTABLE else (reason, "")
    wins = not program.forward.differentiable or libraries_win(forward, functional)
    if not wins and prefers_onednn is not None:
        matmul = largest_matmul(functional)
        wins = matmul is not None and prefers_onednn(matmul)
    return None if wins else "it has too little to fuse to be faster than the forward graph", ""


def _faster_graph(
    program: Program, forward: Graph, functional: Graph, prefers_onednn: Callable[[Matmul], bool] | None
) -> tuple[str, str]:
    """Return which graph is the faster one where both are right and the target is `auto`, and why.

    The first rule that holds decides, so a rule stands before those that it overrules. They follow the figures of
    docs/decisions/0018.
    """
    if not program.forward.differentiable:
        return PORTABLE, "the forward graph is not differentiable"
    # It unrolls operators step by step, as of recurrent layers.
    if len(functional.nodes) > 10 * len(forward.nodes) + 50:
        return AUTOGRAD, f"the other graph takes its {len(forward.nodes)} operators apart, into {len(functional.nodes)}"
    if is_element_wise(forward, functional):
        return PORTABLE, f"most of its {len(functional.nodes)} operators are element-wise"
    matmul = largest_matmul(functional)
    if matmul is None:
        return AUTOGRAD, "no matmul is large enough to gain by oneDNN"
    rows, depth, columns = sizes_of(matmul)
    words = f"for {rows}x{depth} by {depth}x{columns}"
    if prefers_onednn is None:
        return PORTABLE, f"oneDNN may be faster {words}, which the first call measures; else the forward graph runs"
    if prefers_onednn(matmul):
        return PORTABLE, f"oneDNN is faster here {words}"
    return AUTOGRAD, f"oneDNN is not clearly faster here {words}"


def passed_over(targets: Choice, target: str) -> str:
    """Return the compiled targets named by `target` that do not run, with reasons, for the end of a sentence."""
    asked = [name for name in targets.why_not if name != CUDA and (target == "auto" or is_of(name, target))]
    return "".join(f"; not {name}: {targets.why_not[name]}" for name in asked)


# --- the faster graph, by records and recorded figures, which are those of docs/decisions/0018 -----------------

LIBRARY_LOSES_UP_TO_OPERATORS = 3
"""Most operators of a forward graph on small tensors that run faster by calls than by entering a library."""

LIBRARY_LOSES_UP_TO_ELEMENTS = 1 << 14
"""Most elements of a tensor for which calling an operator costs more than its arithmetic."""

FUSED_PER_MATMUL = 1.5
"""Least operators to fuse, per matmul, for which libraries win by fusing alone: BERT has 0.9 of them, and loses; GPT-2
has 2.6, ResNet 2.1."""

CHAIN_GAINS_FROM_OPERATORS = 64
"""Most operators of a functional graph that does not make up for its fixed cost."""

ELEMENT_WISE_PART = 0.75
"""Least part of element-wise operators in a chain of them; chains train in 0.69 of eager's time, and by the forward
graph in 1.08."""

MEASURED_WORK = 1 << 30
"""Most multiplications of a matmul that is measured in a few milliseconds."""

DYNAMIC_SIZE = 64
"""Value that stands for a dynamic size in estimates."""

_ELEMENT_WISE = frozenset((*IN_PLACE, *IN_PLACE.values(), "aten::pow.Tensor_Scalar"))
_FUSED_NORMS = frozenset(("aten::batch_norm.default", "aten::layer_norm.default"))
_CONTRACTIONS = (
    *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention"),
    *("convolution", "conv1d", "conv2d", "conv3d"),
)


def largest_matmul(functional: Graph) -> Matmul | None:
    """Return the largest matmul worth a choice among those quick to measure, else the first; None: there is none."""
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*functional.inputs, *functional.nodes)}
    matmuls = [each for each in matmuls_of(functional.nodes, metas) if is_worth_choosing("fastest", *sizes_of(each))]
    soon = [each for each in matmuls if math.prod(sizes_of(each)) <= MEASURED_WORK]
    return max(soon or matmuls[:1], key=lambda each: math.prod(sizes_of(each)), default=None)


def sizes_of(matmul: Matmul) -> tuple[int, int, int]:
    """Return rows, depth and columns; `DYNAMIC_SIZE` for dynamic sizes."""
    return _size(matmul.rows), _size(matmul.depth), _size(matmul.columns)


def is_element_wise(forward: Graph, functional: Graph) -> bool:
    """Return whether a program is a long chain of element-wise operators, which autograd nodes between would slow."""
    element_wise = sum(node.op in _ELEMENT_WISE for node in forward.nodes)
    return len(functional.nodes) > CHAIN_GAINS_FROM_OPERATORS and element_wise >= ELEMENT_WISE_PART * len(forward.nodes)


def libraries_win(forward: Graph, functional: Graph) -> bool:
    """Return whether fusion alone makes libraries faster than both graphs, by any matmul backend."""
    if is_element_wise(forward, functional):
        return True
    if _is_small(forward):
        return len(forward.nodes) > LIBRARY_LOSES_UP_TO_OPERATORS
    operators = [node.op for node in forward.nodes]
    fused = sum(op in _ELEMENT_WISE or op in _FUSED_NORMS for op in operators)
    matmuls = sum(_name(op) in _CONTRACTIONS for op in operators)
    return fused >= FUSED_PER_MATMUL * matmuls


def _name(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


def _is_small(graph: Graph) -> bool:
    """Return whether calling operators takes most of a step, since all tensors are small."""
    values = (*graph.inputs, *graph.nodes)
    return not graph.subgraphs and all(_elements(value.meta) <= LIBRARY_LOSES_UP_TO_ELEMENTS for value in values)


def _elements(meta: ValueMeta) -> int:
    """Return the number of elements of a value's largest tensor."""
    if isinstance(meta, SequenceMeta):
        return max(map(_elements, meta.items), default=0)
    return math.prod(map(_size, meta.shape)) if isinstance(meta, TensorMeta) else 0


def _size(size: Size) -> int:
    return size if isinstance(size, int) else DYNAMIC_SIZE
