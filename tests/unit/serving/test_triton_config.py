"""`config.pbtxt` of a bundle."""

import pytest

from aotexport_runtime.cli.app import main
from aotexport_runtime.server.messages import Signature
from aotexport_runtime.server.triton_config import config_text, model_config
from aotexport_runtime.serving.interface import BatchAxes, TensorSpec


def spec(name, dtype, *shape):
    return TensorSpec(name=name, dtype=dtype, shape=shape, index=0)


def triton_config(name, inputs, outputs, batch):
    return config_text(model_config(name, Signature.of(inputs, outputs), batch, 32, "python"))


def axes(most, *, inputs=(0,), outputs=(0,)):
    return BatchAxes(name="batch", least=1, most=most, inputs=inputs, outputs=outputs)


def test_triton_config_of_a_proven_batch_lets_triton_gather_requests():
    assert triton_config("digits", [spec("x", "float32", -1, 8)], [spec("y", "int64", -1)], axes(16)) == (
        'name: "digits"\n'
        'backend: "python"\n'
        "max_batch_size: 16\n"
        "input [\n"
        '  { name: "x" data_type: TYPE_FP32 dims: [8] }\n'
        "]\n"
        "output [\n"
        '  { name: "y" data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }\n'
        "]\n"
        "dynamic_batching { }\n"
        "instance_group [\n"
        "  { kind: KIND_CPU count: 1 }\n"
        "]\n"
    )


@pytest.mark.parametrize("batch", [None, axes(16, inputs=(1,))])
def test_triton_config_without_a_batch_in_front_has_whole_shapes(batch):
    text = triton_config("a", [spec("x", "bfloat16", -1, 8)], [spec("y", "bool", 3, 8)], batch)
    assert "max_batch_size: 0\n" in text
    assert '{ name: "x" data_type: TYPE_FP32 dims: [-1, 8] }' in text
    assert '{ name: "y" data_type: TYPE_BOOL dims: [3, 8] }' in text
    assert "dynamic_batching" not in text


def test_triton_config_of_the_command_line_joins_what_recorded_calls_prove(exported, capsys):
    assert main(["triton-config", str(exported("digits")), "--max-batch-size", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('name: "digits"\nbackend: "python"\nmax_batch_size: 8\n')
    assert '{ name: "input" data_type: TYPE_FP32 dims: [8] }' in printed
