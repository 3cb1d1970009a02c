"""Stages of a call in the trace of a profiler."""

import torch

from aotexport_runtime import load


def names(module, batch):
    with torch.profiler.profile() as trace:
        module(batch)["best"].sum().backward()
    return {event.key for event in trace.key_averages() if event.key.startswith("aotexport: ")}


def test_halves_of_a_step_are_marked(tiny):
    batch = torch.linspace(-2, 2, 12).reshape(3, 4)
    assert names(load(tiny, target="portable").train(), batch) == {
        "aotexport: train forward",
        "aotexport: train backward",
    }
    assert names(load(tiny, target="autograd").train(), batch) == {"aotexport: train forward graph"}
