"""Taps: results of submodules beside a call's own result, by forward hooks on the submodules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Call
from aotexport_runtime.engines.forward.live_graph import UNUSED
from aotexport_runtime.engines.forward.submodule_call import without_values
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.submodules.tables import module_at

_FOUND: ContextVar[dict[str, list[Any]] | None] = ContextVar("found", default=None)
"""Results of submodules in the call that runs, by path; None: no call with taps runs."""


def _keep(path: str, module: nn.Module, args: Any, result: Any) -> None:
    """Keep the result of a submodule while a call with taps runs: a forward hook."""
    found = _FOUND.get()
    if found is not None:
        found.setdefault(path, []).append(result)


def add_taps(module: nn.Module, bundle: Bundle, paths: Sequence[str]) -> None:
    """Keep the results of the submodules at `paths` in every call with taps.

    Raises:
        ArgumentInvalid: there is no such submodule.
        NotSupported: no program tells which of its nodes are calls of it.
    """
    known = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    first = {record.name: record.same_as or record.name for record in bundle.manifest.modules}
    graphs = [bundle.graph(name, bundle.program(name).forward.file) for name in bundle.program_names]
    calls: dict[str, str | None] = {}
    for graph in graphs:
        for call in graph.calls:
            # One program that tells is enough: others refuse their calls.
            if calls.get(name := graph.modules[call.module], "") is not None:
                calls[name] = call.refusal or (UNUSED if without_values(call, returned=True) else None)
    for path in paths:
        submodule = module_at(module, path) if path in known else None
        if submodule is None:
            near = ", ".join(f"`{name}`" for name in difflib.get_close_matches(path, known))
            raise ArgumentInvalid(f"`taps`: no submodule `{path}`" + (f"; there are {near}" if near else ""))
        why_not = calls.get(
            first.get(path, path),
            "the model's code does not call it, or was exported with `--strip`, or not by a direct trace",
        )
        if why_not is not None:
            raise NotSupported(f"`taps`: the bundle does not tell what calls of `{path}` return: {why_not}")
        submodule.register_forward_hook(partial(_keep, path))


def tapped(run: Call, paths: Sequence[str]) -> Call:
    """Return a function that calls a program, and returns its result beside those of the submodules at `paths`."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found: dict[str, list[Any]] = {}
        token = _FOUND.set(found)
        try:
            result = run(args, kwargs)
        finally:
            _FOUND.reset(token)
        return result, {p: found[p] if len(found[p]) > 1 else found[p][0] for p in paths if p in found}

    return call
