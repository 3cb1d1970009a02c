"""Which engine runs a program: tables of rules, each with its reason in words. No torch.

Every engine that a bundle has for a program serves it, unless a rule rules it out. The reason is that of the first rule
that does; `explain`, `inspect` and the log show it. Each serving engine takes the calls that the ones before it do not;
the forward graph under autograd is the last, and takes every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines import figures
from aotexport_runtime.engines.candidates import (
    AUTOGRAD,
    CUDA,
    PORTABLE,
    EngineOfProgram,
    Request,
    TargetOfBundle,
    is_native,
    is_of,
)
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.matmul.sizes import Matmul
from aotexport_runtime.schema.program import Program

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


_Facts = TypeVar("_Facts")


class EngineRule(NamedTuple, Generic[_Facts]):
    """A rule that rules engines out (`TARGET_RULES`, `PROGRAM_RULES`), or one that chooses (`GRAPH_PREFERENCES`).

    Attributes:
        engines: names of the engines ruled out, `cpu` for every compiled target; or the name of the engine chosen.
        holds: returns whether it does, given the facts.
        reason: why, in words; `{0.x}` is attribute `x` of the facts.
    """

    engines: str
    holds: Callable[[_Facts], Any]
    reason: str


TARGET_RULES: tuple[EngineRule[TargetOfBundle], ...] = (
    EngineRule("cuda", lambda its: not its.has_kernels, "the bundle has no kernels. Export it with `--target cuda`"),
    EngineRule("cuda cpu", lambda its: its.is_for_another_target, "target `{0.request.target}` was asked for"),
    EngineRule(
        "cuda",
        lambda its: its.request.trust != "native",
        "kernels are native code, which runs only with `trust='native'`",
    ),
    EngineRule(
        "cpu",
        lambda its: its.request.trust != "native",
        "it holds native code, and was loaded without trust='native'",
    ),
    EngineRule("cpu", lambda its: its.is_off_processors, "it is for processors, and was loaded to {0.device}"),
    EngineRule("cpu", lambda its: not its.bundle.target(its.engine).programs, "it has none of the programs"),
    EngineRule("cpu", lambda its: its.unfit, "{0.unfit}"),
    EngineRule("cpu", lambda its: its.higher_level, "{0.higher_level} was chosen"),
)
"""Which native code of a bundle may run: the caller wants it, and this machine can run it."""

GRAPH_PREFERENCES: tuple[EngineRule[EngineOfProgram], ...] = (
    EngineRule(
        "portable", lambda its: not its.program.forward.differentiable, "the forward graph is not differentiable"
    ),
    EngineRule(
        "autograd",
        lambda its: figures.is_taken_apart(its.forward, its.functional),
        "the other graph takes {0.counts}",
    ),
    EngineRule(
        "portable",
        lambda its: figures.is_element_wise(its.forward, its.functional),
        "most of its {0.functional_count} operators are element-wise",
    ),
    EngineRule("autograd", lambda its: its.matmul is None, "no matmul is large enough to gain by oneDNN"),
    EngineRule(
        "portable",
        lambda its: its.prefers_onednn is None,
        "oneDNN may be faster for {0.matmul_in_words}, which the first call measures; else the forward graph runs",
    ),
    EngineRule("portable", lambda its: its.onednn_is_faster, "oneDNN is faster here for {0.matmul_in_words}"),
    EngineRule("autograd", lambda its: True, "oneDNN is not clearly faster here for {0.matmul_in_words}"),
)
"""Which graph of a program is the faster one where both are right and the target is `auto`. The first rule that holds
decides, so a rule stands before those that it overrules. They follow the figures of docs/decisions/0018."""

PROGRAM_RULES: tuple[EngineRule[EngineOfProgram], ...] = (
    EngineRule("cuda cpu portable", lambda its: its.changed, "{0.changed}"),
    EngineRule("cuda portable", lambda its: its.no_functional is not None, "{0.no_functional}"),
    EngineRule("cuda cpu", lambda its: its.is_for_another_target, "target `{0.request.target}` was asked for"),
    EngineRule("portable", lambda its: its.request.target == AUTOGRAD, "target `{0.request.target}` was asked for"),
    EngineRule("cpu", lambda its: its.is_off_processors, "it is for processors, and the bundle is on {0.device}"),
    EngineRule("cuda", lambda its: its.exceeds_budget, "they save more for backward than the memory budget"),
    EngineRule(
        "cpu",
        lambda its: its.exceeds_budget,
        "it saves more for backward than the memory budget of {0.request.memory_budget:g}",
    ),
    EngineRule("cpu", lambda its: its.not_compiled, "{0.not_compiled}"),
    EngineRule("cuda cpu", lambda its: its.failed, "{0.failed}"),
    EngineRule("cpu", lambda its: its.libraries_lose, "it has too little to fuse to be faster than the forward graph"),
)
"""Which engines serve a program; the functional graph also takes the calls that its native code does not."""


def select_targets(
    bundle: Bundle, request: Request, *, device: str | None, why_unfit: Callable[[str], str | None]
) -> Choice:
    """Return the engines of native code that a loaded bundle may run its programs by.

    Args:
        bundle: an open bundle.
        request: the caller's request.
        device: type of the device that the bundle is loaded to; None: where it was captured.
        why_unfit: says why this machine cannot run libraries of a compiled target; None: it can.

    Raises:
        NotSupported: the requested one cannot run; says why.
    """
    # The highest level first: names end with the level.
    compiled = [name for name in reversed(bundle.target_names) if name.startswith("cpu-")]
    serving: list[str] = []
    why_not: dict[str, str] = {}
    for engine in (CUDA, *compiled):
        candidate = TargetOfBundle(
            engine=engine, bundle=bundle, request=request, serving=serving, device=device, why_unfit=why_unfit
        )
        _decide(candidate, TARGET_RULES, serving, why_not)
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
        request: the caller's request.
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
        candidate = EngineOfProgram(
            engine=engine,
            bundle=bundle,
            request=request,
            serving=serving,
            device=device,
            program=program,
            changed=changed,
            failed=failed.get(engine),
            is_measured=is_measured,
            prefers_onednn=prefers_onednn,
        )
        _decide(candidate, PROGRAM_RULES, serving, why_not)
        if engine == PORTABLE and PORTABLE in serving and candidate.is_left_to_figures:
            rule = next(rule for rule in GRAPH_PREFERENCES if rule.holds(candidate))
            if rule.engines == PORTABLE:
                because = rule.reason.format(candidate)
            else:
                serving.remove(PORTABLE)
                why_not[PORTABLE] = rule.reason.format(candidate)
    return Choice(engines=(*serving, AUTOGRAD), why_not=why_not, because=because)


def _decide(candidate: Any, rules: Iterable[EngineRule[Any]], serving: list[str], why_not: dict[str, str]) -> None:
    """Add a candidate to `serving`, or the reason against it to `why_not`."""
    rule = next((rule for rule in rules if candidate.kind in rule.engines.split() and rule.holds(candidate)), None)
    if rule is None:
        serving.append(candidate.engine)
    else:
        why_not[candidate.engine] = rule.reason.format(candidate)


def passed_over(targets: Choice, target: str) -> str:
    """Return the compiled targets named by `target` that do not run, with reasons, for the end of a sentence."""
    asked = [name for name in targets.why_not if name != CUDA and (target == "auto" or is_of(name, target))]
    return "".join(f"; not {name}: {targets.why_not[name]}" for name in asked)
