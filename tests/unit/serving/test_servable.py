"""A servable: names, answers, the proof that it is ready, and what it refuses."""

import re
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

import aotexport_runtime
from aotexport import export
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import ArgumentInvalid, CallInvalid, NotSupported, SelfTestFailed
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.serving.joining import result_of
from aotexport_runtime.serving.servable import Servable
from tests.golden.refuse import seal
from tests.refusals import refusal
from tests.unit.serving.conftest import Pair, digits_model


def described(specs):
    return [(spec.name, spec.dtype, spec.shape) for spec in specs]


def test_servable_names_inputs_and_outputs_by_dotted_paths(exported):
    servable = Servable(exported("pair"))
    assert described(servable.inputs) == [("batch.pair.0", "float32", (2, 3)), ("batch.pair.1", "float32", (2, 3))]
    assert described(servable.outputs) == [
        ("sum", "float32", (2, 3)),
        ("parts.0", "float32", (2, 3)),
        ("parts.1.0", "bfloat16", (2, 3)),
    ]


def test_infer_with_nested_inputs_equals_eager(exported):
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    expected = Pair()({"pair": (a, b)}, 3)
    got = Servable(exported("pair")).infer({"batch.pair.0": a.numpy(), "batch.pair.1": b.numpy()})
    np.testing.assert_array_equal(got["sum"], expected["sum"].numpy())
    np.testing.assert_array_equal(got["parts.0"], expected["parts"][0].numpy())
    # numpy has no bfloat16; float32 has all of its values.
    np.testing.assert_array_equal(got["parts.1.0"], expected["parts"][1][0].float().numpy())


ARRAYS = {
    "read_only": lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
    "stepping_backwards": lambda x: x[::-1].copy()[::-1],
    "columns_first": np.asfortranarray,
    "other_bytes": lambda x: x.astype(">f4"),
}


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_infer_with_an_array_that_tensors_cannot_share_equals_eager(change, exported):
    x = np.random.default_rng(0).random((4, 8), np.float32)
    got = Servable(exported("digits")).infer({"input": change(x)})["output"]
    with torch.no_grad():
        np.testing.assert_allclose(got, digits_model()(torch.from_numpy(x)).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "axes"), [("digits", ("batch", (0,), (0,))), ("attention", ("batch", (1,), (1,))), ("centred", None)]
)
def test_warm_up_finds_the_axis_whose_rows_do_not_know_of_each_other(name, axes, exported):
    servable = Servable(exported(name))
    assert servable.batch_axes is None
    servable.warm_up()
    found = servable.batch_axes
    assert (found and (found.name, found.inputs, found.outputs)) == axes


REASONS = {
    "capacity": r"not along `batch`: operator `aten::cumsum\.default` \(tests/unit/serving/conftest\.py:\d+\) "
    "computes along axis 0 of `self`, which has the rows",
    "clamped": r"not along `batch`: operator `aten::amax\.default` \(tests/unit/serving/conftest\.py:\d+\) "
    "computes along axis 0 of `self`, which has the rows",
    "blurred": "no dynamic size stands once in every input and output, and nowhere else",
}


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_calls_whose_rows_know_of_each_other_are_not_joined_and_the_reason_is_told(name, reason, exported, caplog):
    with caplog.at_level("INFO", "aotexport_runtime"):
        servable = Servable(exported(name), max_latency_ms=50)
        servable.warm_up()
    assert servable.batch_axes is None
    assert re.fullmatch(reason, servable.not_joined)
    assert f"program infer: calls are not joined: {servable.not_joined}" in caplog.messages


@pytest.mark.parametrize("name", ["capacity", "clamped"])
def test_calls_that_are_not_joined_are_answered_as_alone(name, exported):
    servable = Servable(exported(name), max_latency_ms=50)
    servable.warm_up()
    calls = [np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32) * seed for seed in range(8)]
    answers = [servable.submit({"x": x}) for x in calls]
    for x, answer in zip(calls, answers, strict=True):
        np.testing.assert_array_equal(answer.result()["output"], servable.infer({"x": x})["output"])
    servable.close()


def test_model_with_labels_is_served_without(exported):
    servable = Servable(exported("labelled"))
    servable.warm_up()
    x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    with torch.no_grad():
        expected = aotexport_runtime.load(exported("labelled")).eval()(torch.tensor(x))
    assert ([spec.name for spec in servable.inputs], servable.batch_axes.name) == (["x"], "batch")
    (name,) = found = servable.infer({"x": x})
    torch.testing.assert_close(torch.as_tensor(found[name]), expected["scores"], rtol=0, atol=0)


def test_warm_up_refuses_a_model_that_keeps_state(exported):
    assert refusal(NotSupported, Servable(exported("counter")).warm_up) == (
        "calls change the module's `calls`, and what one client is answered would depend on the calls of others. Let "
        "the model's `forward` take this state and return it, and export again"
    )


@pytest.mark.parametrize(("engine", "agrees"), [(None, True), ("portable", False), ("autograd", False)])
def test_float32_beside_bfloat16_is_compared_as_float32_where_a_graph_is_asked_for(exported, engine, agrees):
    servable = Servable(exported("pair"), engine=engine)
    program, bundle = servable._served(), open_bundle(exported("pair"))
    entry = program.recorded_calls[0]
    vector, stored = read_vector(bundle, entry)
    expected, got = (recorded_observation(vector, stored) for _ in range(2))
    name = next(name for name in got.values if name.endswith("output['sum']"))
    got.values[name] = got.values[name] * 1.001
    result = result_of(bundle, program.target, program.least, entry, vector, expected, got)
    assert result.agrees == agrees
    servable.close()


def test_warm_up_of_changed_weights_fails_the_self_test(exported, tmp_path):
    path = copied(exported("digits"), tmp_path)
    with pytest.raises(SelfTestFailed, match=r"^the bundle disagrees with eager execution:\n  infer/example "):
        Servable(path).warm_up()


def copied(path, place):
    """Return a copy of a bundle whose first bias is another, with digests that fit."""
    shutil.copytree(path, place / "bundle")
    state = next(each for each in open_bundle(path).manifest.state if each.name == "0.bias")
    weights = safetensors.torch.load_file(place / "bundle" / state.file)
    weights[state.key] += 1
    safetensors.torch.save_file(weights, place / "bundle" / state.file)
    return seal(place / "bundle")


REFUSALS = {
    "names": ({"x": np.zeros((1, 8), np.float32)}, "`input`: missing\n  - `x`: no such input; there are `input`"),
    "strings": ({"input": np.array([["a"]])}, "`input`: expected an array or a tensor, got an array of <U1"),
}


@pytest.mark.parametrize(("inputs", "text"), REFUSALS.values(), ids=REFUSALS)
def test_infer_refuses_wrong_inputs_by_name(inputs, text, exported):
    said = refusal(CallInvalid, Servable(exported("digits")).infer, inputs)
    assert said == f"the call does not fit program `infer`:\n  - {text}"


def test_precision_beside_what_shares_or_changes_weights_is_refused(exported):
    assert refusal(ArgumentInvalid, Servable, exported("digits"), precision="bfloat16", mapped=True) == (
        "`precision`: bfloat16 computes by copies of the weights that engine `auto` makes. Leave out `engine`, "
        "`mapped`, `adapters`"
    )


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no instructions for bfloat16")
def test_layers_in_bfloat16_answer_within_their_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).eval()
    rows = {0: torch.export.Dim.DYNAMIC}
    export(model, (torch.randn(4, 256),), output=tmp_path / "wide", programs="infer", dynamic_shapes=(rows,))
    servable = Servable(tmp_path / "wide", precision="bfloat16")
    servable.warm_up()
    assert servable.batch_axes is not None
    x = torch.randn(3, 256)
    with torch.no_grad():
        expected = model(x)
    got = servable.infer({"input": x})["output"]
    error = float((got - expected).abs().max() / expected.abs().max())
    assert 1e-4 < error < 4e-2
