"""Which engine runs a bundle: what the caller asks for, what the bundle has, and what the machine and trust allow."""

from __future__ import annotations

import logging

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.engines.cpu import Libraries, unfit
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.program import Program

log = logging.getLogger("aotexport_runtime")


def choose_compiled(
    bundle: Bundle, target: str, trust: str, device: torch.device | None
) -> tuple[str | None, dict[str, str]]:
    """Return the compiled target to run where it has a program, or None, and why the others of the bundle do not run.

    Args:
        bundle: an open bundle.
        target: what the caller asked for: `auto`, an engine, or a compiled target by name.
        trust: the caller's trust in the bundle.
        device: where the bundle is loaded to; None: where it was captured.

    Raises:
        NotSupported: a compiled target was asked for, and none can run; says why.
    """
    # The highest level first; names end with it.
    compiled = [name for name in reversed(bundle.target_names) if name.startswith("cpu-")]
    if target in ("portable", "autograd", "cuda"):
        return None, dict.fromkeys(compiled, f"target `{target}` was asked for")
    named = [name for name in compiled if target in ("auto", "cpu", name)]
    reasons = {name: _obstacle(bundle, name, trust, device) for name in named}
    found = next((name for name, reason in reasons.items() if reason is None), None)
    why_not = {name: reason for name, reason in reasons.items() if reason is not None}
    said = "".join(f"; not {name}: {reason}" for name, reason in why_not.items())
    if found is None and target != "auto":
        has = ", ".join(("portable", *bundle.target_names))
        raise NotSupported(f"target `{target}` cannot run here: the bundle has {has}{said}")
    if named:
        log.info("target %s%s", found or "portable", said)
    passed = {name: f"{found} was chosen" for name in compiled if name != found}
    return found, {**passed, **why_not}


def _obstacle(bundle: Bundle, name: str, trust: str, device: torch.device | None) -> str | None:
    if trust != "native":
        return "it holds native code, and was loaded without trust='native'"
    if device is not None and device.type != "cpu":
        return f"it is for processors, and was loaded to {device.type}"
    target = bundle.target(name)
    return unfit(target.requirements) if target.programs else "it has none of the programs"


def libraries_of(
    bundle: Bundle, target: str | None, program: Program, environment: Environment, why_not: dict[str, str]
) -> Libraries | None:
    """Return the libraries of a program; None, with the reason in `why_not`: it has none, or they cannot be loaded.

    Args:
        bundle: whose native files the caller trusts.
        target: the compiled target that was chosen; None: none.
        program: its record.
        environment: namespaces and device.
        why_not: reasons by target; given another.
    """
    if target is None:
        return None
    if environment.device is not None and environment.device.type != "cpu":
        why_not[target] = f"it is for processors, and the bundle is on {environment.device.type}"
    elif environment.memory_budget < 1 and program.grad:
        why_not[target] = f"it saves more for backward than the memory budget of {environment.memory_budget:g}"
    elif bundle.compiled(target, program.name) is None:
        refusals = {refusal.program: refusal.reason for refusal in bundle.target(target).refusals}
        why_not[target] = refusals.get(program.name, "it has none of this program")
    else:
        try:
            return Libraries(bundle, target, program, environment)
        except NotSupported as error:
            why_not[target] = str(error)
            log.warning("program %s runs its graph, and not target %s: %s", program.name, target, error)
    return None
