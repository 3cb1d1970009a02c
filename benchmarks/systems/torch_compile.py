"""`torch.compile`: just in time, and ahead of time to a file that the model's code loads again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.models import Model, by_position
from benchmarks.systems.eager import EAGER
from benchmarks.systems.interface import Mode, Prepared, System

COLD = "cold caches"
"""The variant that compiles all anew."""


def keep_caches(directory: Path, *, cold: bool = False) -> None:
    """Let torch's compiler keep its caches beside `directory`, before it is imported; cold ones are new.

    All systems of a run share them: what is compiled for one of them is not compiled again for another.
    """
    around = directory.parent
    caches = tempfile.mkdtemp(prefix="caches-", dir=around) if cold else str(around / "caches")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches


def _load(model: Model, directory: Path, mode: Mode, *, cold: bool = False) -> Callable[..., Any]:
    import torch

    keep_caches(directory, cold=cold)
    assert EAGER.load is not None
    return torch.compile(EAGER.load(model, directory, mode))


TORCH_COMPILE = System(
    "torch.compile",
    "torch.compile with its default settings",
    artefact="weights",
    prepare=EAGER.prepare,
    load=_load,
    exports=False,
    load_variants={"": {}, COLD: {"cold": True}},
    start_variants=("", COLD),
)


class _Loaded:
    """A compiled function with the module whose code and parameters it takes."""

    def __init__(self, function: Callable[..., Any], module: Any) -> None:
        self._function = function
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    def parameters(self) -> Iterator[Any]:
        return self._module.parameters()

    def state_dict(self) -> Any:
        return self._module.state_dict()


def _run(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `module`: a compiled method would hold its module, which is not saved."""
    return module(*args, **kwargs)


def _prepare_ahead(model: Model, directory: Path) -> Prepared:
    import torch

    EAGER.prepare(model, directory)
    keep_caches(directory)
    for mode in ("train", "infer"):
        assert EAGER.load is not None
        module: Any = EAGER.load(model, directory, mode)
        args, kwargs = by_position(model.inputs())
        with torch.set_grad_enabled(mode == "train"):
            compiled: Any = torch.compile(_run, fullgraph=True)
            compiled.aot_compile(((module, *args), kwargs)).save_compiled_function(str(directory / f"{mode}.aot"))
    return Prepared()


def _load_ahead(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import torch

    keep_caches(directory)
    assert EAGER.load is not None
    module: Any = EAGER.load(model, directory, mode)
    with (directory / f"{mode}.aot").open("rb") as file:
        return _Loaded(torch.compiler.load_compiled_function(file), module)


AOT_COMPILE = System(
    "aot_compile",
    "torch.compile's aot_compile and load_compiled_function; a pickle, and the model's code",
    artefact="compiled",
    prepare=_prepare_ahead,
    load=_load_ahead,
)
