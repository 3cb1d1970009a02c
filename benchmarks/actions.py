"""What is timed in a process, by name: each maker returns a function that does it once.

A function that runs the model returns its output, `export` returns what preparing told, `load` returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.job import Job
from benchmarks.models import call
from benchmarks.sharing import WAYS, SharedStep
from benchmarks.systems import Prepared
from benchmarks.tuning import TUNINGS, tuned

Action = Callable[[], Any]


def train_step(job: Job) -> Action:
    """Gradients reset, forward, loss, backward; no optimizer."""
    module, inputs, loss = job.load("train"), job.model.inputs(), job.model.loss
    parameters = list(module.parameters())  # type: ignore[attr-defined]

    def step() -> Any:
        for parameter in parameters:
            parameter.grad = None
        output = call(module, inputs)
        loss(output).backward()
        return output

    return step


def tuning_step(job: Job, tuning: str) -> Action:
    """Forward, loss, backward, AdamW over what is trained."""
    import torch

    module, inputs, loss = tuned(job, tuning), job.model.inputs(), job.model.loss
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-5)

    def step() -> Any:
        output = call(module, inputs)
        optimizer.zero_grad()
        loss(output).backward()
        optimizer.step()
        return output

    return step


def whole_step(job: Job) -> Action:
    """Forward, loss, backward, AdamW over all weights: the loop of eager, or one call of a stepper."""
    import torch

    module, inputs, loss = job.load("train"), job.model.inputs(), job.model.loss
    if "step" in job.system.modes and job.system.exports:
        return lambda: call(module, inputs)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-5, fused="step" in job.system.modes)  # type: ignore[attr-defined]
    update = torch.compile(optimizer.step) if job.system.name == "torch.compile" else optimizer.step

    def step() -> Any:
        found = loss(call(module, inputs))
        found.backward()
        update()
        optimizer.zero_grad()  # A step ends as it began: its memory has its gradients.
        return found.detach()

    return step


def inference(job: Job) -> Action:
    """A call in eval mode under `no_grad`."""
    import torch

    module, inputs = job.load("infer"), job.model.inputs()

    def infer() -> Any:
        with torch.no_grad():
            return call(module, inputs)

    return infer


def forward(job: Job) -> Action:
    """A call in train mode that records for backward, and no backward."""
    module, inputs = job.load("train"), job.model.inputs()
    return lambda: call(module, inputs)


def forward_backward(job: Job) -> Action:
    """A call in train mode, and backward from a given gradient of its output: no loss."""
    import torch

    module, inputs = job.load("train"), job.model.inputs()
    parameters = list(module.parameters())  # type: ignore[attr-defined]
    tangent = torch.ones_like(call(module, inputs))

    def run() -> Any:
        for parameter in parameters:
            parameter.grad = None
        output = call(module, inputs)
        output.backward(tangent)
        return output

    return run


def load(job: Job) -> Action:
    """From the artefact to a module."""

    def run() -> None:
        job.load("train")

    return run


def export(job: Job) -> Action:
    """From the model to the artefact."""

    def run() -> Prepared:
        return job.system.prepare(job.model, job.directory)

    return run


ACTIONS: dict[str, Callable[[Job], Action]] = {
    "train step": train_step,
    "whole step": whole_step,
    "inference": inference,
    "forward": forward,
    "forward + backward": forward_backward,
    "load": load,
    "export": export,
    **{f"tune {tuning}": partial(tuning_step, tuning=tuning) for tuning in TUNINGS},
    **{f"share {way}": partial(SharedStep, way=way) for way in WAYS},
}
"""Makers of actions, by name."""
