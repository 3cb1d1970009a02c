"""Torch's translations to ONNX are read once in a process."""

from __future__ import annotations

from torch.onnx._internal._lazy_import import onnxscript_apis

from aotexport.torch_internals.onnx_translations import translations_read_once


def test_translations_are_read_once_and_the_patch_is_undone():
    read = onnxscript_apis.get_torchlib_ops
    with translations_read_once():
        first = onnxscript_apis.get_torchlib_ops()
    with translations_read_once():
        assert onnxscript_apis.get_torchlib_ops() is first
    assert onnxscript_apis.get_torchlib_ops is read
    assert len(first) == len(read()) > 100
