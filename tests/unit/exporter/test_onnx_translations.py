"""Torch's translations to ONNX are read once in a process, and a model's own are in its registry alone."""

from __future__ import annotations

import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from aotexport.torch_internals import releases
from aotexport.torch_internals.onnx_translations import translations_read_once

SINE = torch.ops.aten.sin.default
VERSION = 18


def test_translations_are_read_once_and_the_patch_is_undone():
    read = vars(ONNXRegistry)["from_torchlib"]
    with translations_read_once():
        first, second = (ONNXRegistry().from_torchlib(opset_version=VERSION) for _ in range(2))
    assert vars(ONNXRegistry)["from_torchlib"] is read
    assert first.get_decomps(SINE)[0] is second.get_decomps(SINE)[0]
    assert second.functions.keys() == ONNXRegistry.from_torchlib(opset_version=VERSION).functions.keys()


def test_translations_of_a_model_are_its_own():
    with translations_read_once():
        own, other = (ONNXRegistry.from_torchlib(opset_version=VERSION) for _ in range(2))
        before = len(other.get_decomps(SINE))
        own.register_op(SINE, lambda x: x)
    assert (len(own.get_decomps(SINE)), len(other.get_decomps(SINE))) == (before + 1, before)


def test_translations_are_read_again_where_there_are_more_operators():
    with translations_read_once(), torch.library._scoped_library("counted", "DEF") as library:
        before = ONNXRegistry.from_torchlib(opset_version=VERSION)
        library.define("one(Tensor x) -> Tensor")
        after = ONNXRegistry.from_torchlib(opset_version=VERSION)
    assert before.get_decomps(SINE)[0] is not after.get_decomps(SINE)[0]


def test_translations_are_read_for_each_model_by_an_untested_torch(monkeypatch):
    monkeypatch.setattr(releases, "RELEASES", {})
    with translations_read_once():
        first, second = (ONNXRegistry.from_torchlib(opset_version=VERSION) for _ in range(2))
    assert first.get_decomps(SINE)[0] is not second.get_decomps(SINE)[0]
