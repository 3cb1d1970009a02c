"""What the self-test compares where a program runs on another kind of device than it was recorded on."""

import pytest
import torch
from torch import nn

import aotexport_runtime
from aotexport_runtime.commands.self_test import why_values_differ


@pytest.fixture(scope="module")
def bundle(new_bundle):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    return new_bundle(model, torch.randn(2, 3))


@pytest.mark.parametrize(
    ("program", "device", "reason"),
    [
        ("train", "cuda:0", "it draws random numbers, others on cuda than on cpu"),
        ("train", "cpu", ""),
        ("train", "", ""),
        ("infer", "cuda:0", ""),
    ],
)
def test_values_of_draws_are_compared_on_the_kind_of_device_that_recorded_them(bundle, program, device, reason):
    assert why_values_differ(aotexport_runtime.open_bundle(bundle), program, device) == reason
