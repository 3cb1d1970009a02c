"""Refuse models that fail on their example by themselves with their own error, not with that of a trace."""

from __future__ import annotations

import traceback

from torch import nn

from aotexport.eager.run import eager_run, runs_without_gradients
from aotexport.errors import ExportFailed
from aotexport.model.programs import ProgramSpec
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.model.state import State


def refuse_failing_example(spec: ProgramSpec, state: State) -> None:
    """Refuse a call on which the model itself fails, with its own error and the user's line.

    Args:
        spec: the program whose capture failed.
        state: the module's state; left as it was.

    Raises:
        ExportFailed: the model fails.
    """
    try:
        with (
            attempt("example call"),
            eager_run(spec.call, state, spec.mode, grad=spec.grad, outside=True) as run,
        ):
            run()
    except ExportFailed as refusal:
        error = refusal.error
        mode = f" in {spec.mode} mode" if spec.call.module is not None else ""
        hint = ""
        if spec.grad and runs_without_gradients(spec.call, state, "eval"):
            hint = ". It runs without gradients in eval mode: export that alone (`--program infer`)"
        elif spec.call.module is None and _makes_a_module(error):
            hint = (
                f". `{spec.call.name}` seems to make the model, and has required arguments: give it these "
                "(`functools.partial`), or export what it returns"
            )
        told = described(error).removesuffix(".") if hint else described(error)
        raise ExportFailed(f"the model fails on the example inputs{mode}: {told}{hint}") from error


def _makes_a_module(error: Exception) -> bool:
    """Return whether the error comes from the constructor of a module."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "__init__" and isinstance(f.f_locals.get("self"), nn.Module) for f in frames)
