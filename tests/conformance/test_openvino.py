"""The engine `openvino`: ONNX models of bundles through OpenVINO, equal to eager or refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.export import Dim

import aotexport
import aotexport_runtime
from aotexport_runtime import CheckFailed, NotSupported, OnnxRuntime, OpenVino, Servable
from tests.hostile.crafted import Crafted

openvino = pytest.importorskip("openvino", reason="needs the extra `openvino`")
from aotexport_runtime.engines.openvino import session  # noqa: E402
from tests.models import seeded  # noqa: E402
from tests.refusals import refusal  # noqa: E402


class Counting(nn.Module):
    """Changes an argument and a buffer; returns them, None and a number beside embedded words."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, ids, x):
        self.calls.add_(1)
        x.mul_(2)
        return {"y": self.head(self.embed(ids)).relu() + x[0], "none": None, "calls": self.calls, "number": 3}


def call(words=7):
    return torch.arange(2 * words).reshape(2, words) % 50, torch.ones(3)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def counting(new_bundle):
    options = aotexport.OnnxOptions(state="outputs")
    sizes = ({1: Dim("words", min=2, max=64)}, None)
    return new_bundle(seeded(Counting).eval(), *call(), programs="infer", dynamic_shapes=sizes, onnx=options)


@pytest.mark.parametrize("words", [2, 7, 40])
def test_openvino_engine_gives_the_values_changes_and_structure_of_eager(counting, words):
    model, module = seeded(Counting).eval(), aotexport_runtime.load(counting, target="openvino")
    for _ in range(2):
        (ids, x), (_, y), (_, z) = call(words), call(words), call(words)
        with torch.no_grad():
            expected = model(ids, x)
            got = module(ids, y)
        arrays = aotexport_runtime.load(counting, target="openvino")(ids.numpy(), z.numpy())
        assert list(got) == ["y", "none", "calls", "number"]
        assert (got["none"], got["number"], type(arrays["y"])) == (None, 3, np.ndarray)
        torch.testing.assert_close(got["y"], expected["y"])
        torch.testing.assert_close(torch.from_numpy(arrays["y"]), expected["y"])
        torch.testing.assert_close(got["calls"], expected["calls"])
        torch.testing.assert_close((x, module.state["calls"]), (y, model.calls))
    assert str(module.explain()) == "target openvino\nprogram infer on CPU: openvino (OpenVINO)"


def test_recorded_calls_and_a_server_run_by_openvino(counting, new_bundle):
    results = aotexport_runtime.selftest(counting, target="openvino")
    assert {(result.target, result.ran[0].engine) for result in results} == {("openvino", "openvino")}
    head = new_bundle(seeded(Counting).eval().head, torch.ones(2, 16), programs="infer", onnx=True)
    servable = Servable(head, engine="openvino", threads=1)
    servable.warm_up()
    (answer,) = servable.infer({servable.inputs[0].name: np.ones((2, 16), np.float32)}).values()
    np.testing.assert_allclose(answer, seeded(Counting).eval().head(torch.ones(2, 16)).detach().numpy(), rtol=1e-5)
    servable.close()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (50, "an index is out of bounds"),
        (
            1 << 40,
            "`ids` holds integers of 16,777,216 or more, and OpenVINO computes with fewer bits than eager. Load target "
            "`onnx`, or `portable`",
        ),
    ],
)
def test_integers_that_openvino_takes_for_others_are_refused(counting, word, message):
    ids, x = call()
    ids[1, 1] = word
    module = aotexport_runtime.load(counting, target="openvino")
    assert (refusal(CheckFailed, module, ids, x), x.tolist(), module.state) == (message, [1.0] * 3, {})


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (1, 1)])
def test_threads_are_those_of_torch_unless_others_are_asked_for(counting, asked, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        by_openvino = aotexport_runtime.load(counting, target="openvino", openvino=OpenVino(threads=asked))
        by_onnx = aotexport_runtime.load(counting, target="onnx", onnx=OnnxRuntime(threads=asked))
    finally:
        torch.set_num_threads(before)
    assert by_openvino.session("infer").get_property("INFERENCE_NUM_THREADS") == expected
    assert by_onnx.session("infer").get_session_options().intra_op_num_threads == expected


def test_compiled_model_in_the_cache_is_not_taken_for_other_weights(counting, tmp_path):
    ids, x = call()
    before = aotexport_runtime.load(counting, target="openvino")(ids, x.clone())["y"]
    crafted = Crafted(counting, tmp_path / "bundle")
    (name,) = {
        entry.file for entry in aotexport_runtime.open_bundle(counting).manifest.state if entry.role != "constant"
    }
    data = bytearray((counting / name).read_bytes())
    data[-64:] = bytes(64)
    crafted.write(name, bytes(data))
    root = crafted.seal()
    expected = aotexport_runtime.load(root, target="onnx")(ids, x.clone())["y"]
    torch.testing.assert_close(aotexport_runtime.load(root, target="openvino")(ids, x)["y"], expected)
    assert not torch.allclose(before, expected)


def test_model_that_refers_outside_of_the_bundle_is_refused(counting, tmp_path):
    crafted = Crafted(counting, tmp_path / "bundle")
    model = onnx.load(counting / "model.onnx", load_external_data=False)
    for entry in (entry for tensor in model.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = "../other/model.safetensors"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(bytes(100_000))
    crafted.write("model.onnx", model.SerializeToString())
    with pytest.raises(NotSupported, match=r"^OpenVINO .* does not run `model.onnx`: "):
        aotexport_runtime.load(crafted.seal(), target="openvino")


# --- what OpenVINO computes otherwise -----------------------------------------------------------------------


def _model(tmp_path, nodes, inputs, *, constants=()):
    """Return a model that OpenVINO has read; `inputs`: by name, type and axes."""
    values = [helper.make_tensor_value_info(name, dtype, axes) for name, dtype, axes in inputs]
    output = helper.make_empty_tensor_value_info("y")
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants]
    graph = helper.make_graph(nodes, "graph", values, [output], initial)
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), file)
    return session.openvino_core().read_model(file)


def _op(kind, *inputs, output="y", **attributes):
    return helper.make_node(kind, [*inputs], [output], **attributes)


INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


@pytest.mark.parametrize(
    ("nodes", "inputs", "reason"),
    [
        ([_op("Cast", "x", to=FLOAT)], [("x", INT64, ["n"])], None),
        ([_op("Equal", "x", "x", output="b"), _op("Cast", "b", to=INT64)], [("x", INT64, ["n"])], None),
        ([_op("Shape", "x", output="s"), _op("Mul", "s", "s")], [("x", FLOAT, ["n"])], None),
        (
            [_op("SoftmaxCrossEntropyLoss", "p", "x", ignore_index=-100)],
            [("p", FLOAT, ["n", 3]), ("x", INT64, ["n"])],
            None,
        ),
        (
            [_op("Sub", "x", "one")],
            [("x", INT64, ["n"])],
            "it computes integers (i64) by `Subtract`, which OpenVINO does with fewer bits than eager",
        ),
        (
            [_op("Add", "x", "x")],
            [("x", INT64, ["n"])],
            "it computes integers (i64) by `Add`, which OpenVINO does with fewer bits than eager",
        ),
        (
            [_op("Cast", "x", to=INT64)],
            [("x", FLOAT, ["n"])],
            "it computes integers (i64) by `Convert`, which OpenVINO does with fewer bits than eager",
        ),
        (
            [_op("Equal", "x", "large")],
            [("x", INT64, ["n"])],
            "it has integers of 16,777,216 or more (`Equal`), and OpenVINO computes with fewer bits than eager",
        ),
        (
            [_op("Add", "x", "x")],
            [("x", TensorProto.DOUBLE, ["n"])],
            "it computes in f64, and OpenVINO in another dtype",
        ),
    ],
)
def test_model_is_refused_where_openvino_computes_otherwise(tmp_path, nodes, inputs, reason):
    constants = [("one", np.array([1])), ("end", np.array([2**63 - 1])), ("large", np.array([1 << 40]))]
    assert session.why_inexact(_model(tmp_path, nodes, inputs, constants=constants)) == reason


_DATA = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize(
    ("node", "axes", "good", "bad"),
    [
        (_op("Gather", "data", "i"), ["n"], [0, -3, 2], [[3], [-4]]),
        (_op("Gather", "data", "i", axis=1), ["n"], [0, -2, 1], [[2], [-3]]),
        (_op("GatherElements", "data", "i"), ["n", 2], [[0, -3], [2, 1]], [[[3, 0]], [[0, -4]]]),
        (_op("GatherND", "data", "i"), ["n", 2], [[0, -2], [2, 1]], [[[0, 2]], [[3, 0]]]),
        (_op("ScatterElements", "data", "i", "u"), ["n", 2], [[0, -3]], [[[3, 0]], [[0, -4]]]),
    ],
)
def test_indices_out_of_bounds_are_seen(tmp_path, node, axes, good, bad):
    inputs = [("i", INT64, axes), ("u", FLOAT, axes)][: len(node.input) - 1]
    model = _model(tmp_path, [node], inputs, constants=[("data", _DATA)])
    assert session.indices_in_bounds(model)
    compiled = session.openvino_core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})
    results = []
    for indices, expected in [(good, True), *((each, False) for each in bad), (good, True)]:
        array = np.array(indices, np.int64)
        feeds = {"i": array, "u": np.zeros(array.shape, np.float32)}
        found = compiled({name: feeds[name] for name in node.input[1:]})
        assert bool(found[1]) is expected
        results.append(found[0])
    np.testing.assert_array_equal(results[0], results[-1])


def test_failed_call_is_told_and_leaves_the_next_one_right(tmp_path):
    model = _model(tmp_path, [_op("Add", "x", "z")], [("x", FLOAT, ["n"]), ("z", FLOAT, ["m"])])
    infer = session.Infer(
        lambda: session.openvino_core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1}), {}, is_checked=False
    )
    for sizes in ((2, 2), (2, 3), (4, 4), (3, 2), (3, 3)):
        x, z = (np.arange(size, dtype=np.float32) for size in sizes)
        if len(x) == len(z):
            np.testing.assert_array_equal(infer(["y"], {"x": x, "z": z})[0], x + z)
        else:
            with pytest.raises(CheckFailed, match=r"^OpenVINO failed: .* Load target `onnx`, or `portable`$"):
                infer(["y"], {"x": x, "z": z})


@pytest.mark.parametrize("size", [2, 1 << 18])
def test_results_of_known_sizes_are_of_their_own_memory(tmp_path, size):
    model = _model(tmp_path, [_op("Add", "x", "x")], [("x", FLOAT, [size])])
    infer = session.Infer(lambda: session.openvino_core().compile_model(model, "CPU"), {}, is_checked=False)
    results = [infer(["y"], {"x": np.full(size, value, np.float32)})[0] for value in (1, 2, 3)]
    np.testing.assert_array_equal(np.stack(results)[:, [0, -1]], [[2, 2], [4, 4], [6, 6]])


_INTERRUPTED = """
import faulthandler, gc, os, signal, sys, threading
faulthandler.enable()
import torch, aotexport_runtime
loaded = [aotexport_runtime.load(sys.argv[1], target="openvino")]
thread = threading.Thread(target=lambda: (loaded.clear(), gc.collect()))
thread.start()
thread.join()
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
os.kill(os.getpid(), signal.SIGINT)
"""


def test_interrupt_is_handled_after_another_thread_let_go_of_the_module(counting):
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(counting)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
