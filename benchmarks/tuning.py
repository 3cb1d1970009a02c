"""Ways to fine-tune a model, for every system: all weights, a part of them, LoRA (by peft where it is no bundle)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.systems.eager import EAGER

if TYPE_CHECKING:
    from benchmarks.job import Job

_RANK, _ALPHA = 8, 16


def tuned(job: Job, tuning: str) -> Any:
    """Return the module of a job, in train mode, with what `tuning` trains.

    torch.compile compiles it as it is then.
    """
    if job.system.name != "torch.compile":
        return TUNINGS[tuning](job.load("train"))
    import torch

    from benchmarks.systems.torch_compile import keep_caches

    keep_caches(job.directory)
    assert EAGER.load is not None
    return torch.compile(TUNINGS[tuning](EAGER.load(job.model, job.directory, "train")))


def _all(module: Any) -> Any:
    return module


def _half(module: Any) -> Any:
    """Freeze the first half of the parameters."""
    parameters = list(module.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return module


def _lora(module: Any) -> Any:
    import torch

    from aotexport_runtime import adapters
    from aotexport_runtime.module.bundle_module import BundleModule

    torch.manual_seed(1)
    if isinstance(module, BundleModule):
        adapters.add_lora(module, "all-linear", r=_RANK, alpha=_ALPHA)
        return module
    import peft

    config = peft.LoraConfig(r=_RANK, lora_alpha=_ALPHA, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's layers are transposed, which peft mends and says.
        return peft.get_peft_model(module, config).train()


TUNINGS: dict[str, Callable[[Any], Any]] = {"all weights": _all, "half frozen": _half, "LoRA": _lora}
"""What is trained, by name; each changes a module in place and returns what to call."""
