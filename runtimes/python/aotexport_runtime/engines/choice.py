"""Which engine runs a bundle: what the caller asks for, what the bundle has, and what the machine and trust allow."""

from __future__ import annotations

import logging

import torch

from aotexport_runtime.bundle import Bundle
from aotexport_runtime.engines.cpu import unfit
from aotexport_runtime.errors import NotSupported

log = logging.getLogger("aotexport_runtime")


def choose_compiled(bundle: Bundle, target: str, trust: str, device: torch.device | None) -> str | None:
    """Return the compiled target to run where it has a program; None: none.

    Args:
        bundle: an open bundle.
        target: what the caller asked for: `auto`, an engine, or a compiled target by name.
        trust: the caller's trust in the bundle.
        device: where the bundle is loaded to; None: where it was captured.

    Raises:
        NotSupported: a compiled target was asked for, and none can run; says why.
    """
    if target in ("portable", "autograd", "cuda"):
        return None
    # The highest level first; names end with it.
    named = [
        name for name in reversed(bundle.target_names) if name.startswith("cpu-") and target in ("auto", "cpu", name)
    ]
    reasons = {name: _obstacle(bundle, name, trust, device) for name in named}
    found = next((name for name, reason in reasons.items() if reason is None), None)
    said = "".join(f"; not {name}: {reason}" for name, reason in reasons.items() if reason is not None)
    if found is None and target != "auto":
        has = ", ".join(("portable", *bundle.target_names))
        raise NotSupported(f"target `{target}` cannot run here: the bundle has {has}{said}")
    if named:
        log.info("target %s%s", found or "portable", said)
    return found


def _obstacle(bundle: Bundle, name: str, trust: str, device: torch.device | None) -> str | None:
    if trust != "native":
        return "it holds native code, and was loaded without trust='native'"
    if device is not None and device.type != "cpu":
        return f"it is for processors, and was loaded to {device.type}"
    target = bundle.target(name)
    return unfit(target.requirements) if target.programs else "it has none of the programs"
