"""`load(frozen=True)`: the fastest engine of a program, by measurement, with eager's meaning."""

from __future__ import annotations

import copy
import gc
import math
import re
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport_runtime
from aotexport_runtime import NotSupported
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.engines import frozen, sized
from aotexport_runtime.engines.candidates import FROZEN_ENGINES, Request
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.module import measured
from aotexport_runtime.module.onnx_module import runtime_of
from aotexport_runtime.rewrite.layers import CONVOLUTION, Layer, constants_of, layered
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import StateInput
from tests.models import seeded

ENGINES = (*FROZEN_ENGINES, "portable", "autograd")


class Words(nn.Module):
    """Embedded words, and a result whose axes are turned."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 256)
        self.head = nn.Linear(256, 256)

    def forward(self, ids, x):
        hidden = self.head(self.embed(ids) + x).relu()
        return hidden, hidden.transpose(0, 1) * 2


def call(rows=3):
    return torch.arange(5 * rows).reshape(rows, 5) % 20, torch.linspace(-1, 1, 256)


@pytest.fixture(scope="module")
def words(new_bundle):
    sizes = ({0: Dim("rows", min=2, max=32)}, None)
    return new_bundle(seeded(Words).eval(), *call(), programs="infer", dynamic_shapes=sizes, onnx=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AOTEXPORT_MEASURE", raising=False)


def load(path, **options):
    return aotexport_runtime.load(path, frozen=True, **options)


def prefer(path, engine, **more):
    """Keep figures by which an engine is the fastest."""
    seconds = {name: 1e-3 if name == engine else 1.0 for name in ENGINES}
    measured.kept_figures(open_bundle(path), Request(frozen=True)).add("infer", {"seconds": seconds, "why_not": more})


def run(module, *args):
    with torch.no_grad():
        return module(*args)


def check(module, *args, model=None):
    expected, got = run(model or seeded(Words).eval(), *args), run(module, *args)
    torch.testing.assert_close(got, expected)
    assert [each.stride() for each in got] == [each.stride() for each in expected]


def engine_of(module):
    """Return the engine that ran last in the log of the plan."""
    return module.explain_program("infer").has_run[-1].engine


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_model_that_is_called_directly_takes_any_layout_and_gives_eagers(new_bundle, engine):
    pytest.importorskip({"onnx": "onnxruntime"}.get(engine, engine), reason=f"needs the extra `{engine}`")
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval()
    sizes = ({0: Dim("rows", min=1, max=32)},)
    bundle = new_bundle(model, torch.randn(3, 8), programs="infer", dynamic_shapes=sizes, onnx=True)
    prefer(bundle, engine)
    module = load(bundle).eval()
    for x in (torch.randn(3, 8), torch.randn(8, 5).t(), torch.randn(4, 16)[:, ::2], torch.randn(1, 8).expand(6, 8)):
        expected, got = run(model, x), run(module, x.requires_grad_(x.is_leaf))
        torch.testing.assert_close(got, expected)
        assert (got.stride(), got.requires_grad) == (expected.stride(), False)
    first = module.explain().programs[0].has_run[0]
    assert (first.passes, first.engine) == ("forward", engine)


def test_engine_whose_first_call_is_slow_and_short_is_measured_again():
    begins = iter([range(20_000)])
    least = measured._least({"steady": [lambda: None], "warming": [lambda: sum(next(begins, ()))]})
    assert least["warming"] < 1e-4


def test_engines_are_measured_once_and_told(words):
    module = load(words)
    check(module, *call())
    (told,) = module.explain().programs
    first, others = told.engines[0], {*told.engines[1:], *told.why_not}
    assert told.because.startswith("measured here: ")
    assert {first, *others} >= {"onnx", "portable", "autograd"}
    (again,) = load(words).explain().programs
    assert (again.engines, again.because, again.why_not) == (told.engines, told.because, told.why_not)


@pytest.mark.parametrize(("options", "variable"), [({}, None), ({"frozen": True}, "0"), ({"target": "portable"}, "1")])
def test_engines_are_chosen_by_rules_where_nobody_wants_a_measurement(words, monkeypatch, options, variable):
    if variable is not None:
        monkeypatch.setenv("AOTEXPORT_MEASURE", variable)
    told = aotexport_runtime.load(words, **options).explain_program("infer")
    assert not {*told.engines, *told.why_not} & {*FROZEN_ENGINES}
    assert not told.because.startswith("measured")


def test_program_that_draws_is_not_measured(new_bundle):
    path = new_bundle(torch.rand_like, torch.ones(3), programs="infer")
    assert not load(path).explain_program("infer").because.startswith("measured")


@pytest.mark.parametrize("engine", FROZEN_ENGINES)
@pytest.mark.parametrize("rows", [2, 3, 32])
def test_chosen_engine_gives_the_results_of_eager(words, engine, rows):
    pytest.importorskip(
        {"onnx": "onnxruntime", "openvino": "openvino"}.get(engine, "torch"), reason=f"needs the extra `{engine}`"
    )
    prefer(words, engine)
    module = load(words)
    check(module, *call(rows))
    assert engine_of(module) == engine
    with pytest.raises(IndexError):
        run(module, torch.full((3, 5), 20), call()[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.head.load_state_dict({"weight": torch.ones(256, 256), "bias": torch.zeros(256)}),
        lambda module: setattr(module.head, "weight", nn.Parameter(torch.ones(256, 256))),
    ],
    ids=["in_place", "replaced"],
)
@pytest.mark.parametrize(("engine", "before"), [("onnx", True), ("onnx", False), ("packed", True), ("packed", False)])
def test_changed_weight_is_the_weight_of_the_next_call(words, change, engine, before):
    prefer(words, engine)
    module, model = load(words), seeded(Words).eval()
    if not before:
        check(module, *call())
    change(module)
    change(model)
    check(module, *call(), model=model)
    assert engine_of(module) != engine


def test_state_is_known_by_one_version_and_a_count_until_it_changes(words):
    prefer(words, "onnx")
    module = load(words)
    held = module.__dict__["_loaded"]
    check(module, *call())
    bias = module.head.bias
    for change in (
        lambda each: each.head.register_parameter("bias", nn.Parameter(torch.ones(256))),
        lambda each: each.head._parameters.update(bias=nn.Parameter(torch.full((256,), 2.0))),
    ):
        model = seeded(Words).eval()
        with torch.no_grad():
            change(module)
            change(model)
        assert not held.hold()
        check(module, *call(), model=model)
        module.head.bias = bias
        check(module, *call())
        assert held.hold()
    other = {"head.bias": torch.full((256,), 3.0)}
    got, expected = (
        run(lambda *args, m=m: torch.func.functional_call(m, other, args), *call())
        for m in (module, seeded(Words).eval())
    )
    torch.testing.assert_close(got, expected)
    assert held.hold()
    model = seeded(Words).eval()
    for each in (module, model):
        each.embed.weight.detach().view(10, 512)[3].add_(1)
    assert not held.hold()
    check(module, *call(), model=model)


def test_gradients_copies_threads_and_modes_are_served_by_graphs(words):
    prefer(words, "onnx")
    module = load(words)
    check(module, *call())
    results = module(*call())
    assert all(result.requires_grad for result in results)
    check(copy.deepcopy(module), *call())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        check(module, *call())
        assert engine_of(module) != "onnx"
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        check(module, *call())
    finally:
        torch.use_deterministic_algorithms(False)


# --- sessions for the sizes of a call -----------------------------------------------------------------------


@pytest.fixture(params=["onnx", "openvino"])
def sized_engine(request, words, monkeypatch):
    """Let the sessions of one engine be the fastest; graphs are the usual engine."""
    pytest.importorskip(
        {"onnx": "onnxruntime"}.get(request.param, request.param), reason=f"needs the extra `{request.param}`"
    )
    seconds = {"portable": 1e-3, "autograd": 1.0, request.param: 1.0}
    measured.kept_figures(open_bundle(words), Request(frozen=True)).add("infer", {"seconds": seconds, "why_not": {}})
    for name, value in {"_LEAST_S": 0, "_ENOUGH_S": 0, "CLEARLY": math.inf, "_MOST_SIZES": 2}.items():
        monkeypatch.setattr(sized, name, value)
    return request.param


def call_often(module, rows, model=None):
    """Call until what serves these sizes is decided, and once more."""
    for begin, end in ((0, 3), (3, 14)):
        for number in range(begin, end):
            words, scale = call(rows)
            check(module, (words + number) % 20, scale, model=model)
        for thread in threading.enumerate():
            if thread.name == "sessions":
                thread.join()


def test_sizes_that_are_called_often_get_sessions_of_their_own(words, sized_engine):
    module = load(words)
    for rows in (2, 3, 32, 2):
        call_often(module, rows)
    told = module.explain_program("infer").because
    assert re.findall(r"; (\w+) for rows (\d+), in", told) == [(sized_engine, "2"), (sized_engine, "3")]
    with pytest.raises(IndexError):
        run(module, torch.full((3, 5), 20), call()[1])
    check(module, *call())
    model = seeded(Words).eval()
    for each in (module, model):
        with torch.no_grad():
            each.head.weight.mul_(2)
    check(module, *call(), model=model)


def test_session_that_gives_other_results_serves_no_call(words, sized_engine, monkeypatch):
    runtime = type(runtime_of(sized_engine))
    original, dropped = runtime.open, []

    def opened(self, bundle, model, symbols=MappingProxyType({})):
        session = original(self, bundle, model, symbols)
        wrong = lambda *args: [result + 1 for result in session.infer(*args)]  # noqa: E731
        dropped.append(weakref.ref(wrong))
        return replace(session, infer=wrong) if symbols else session

    monkeypatch.setattr(runtime, "open", opened)
    module = load(words)
    gc.disable()
    try:
        call_often(module, 3)
        assert [each() for each in dropped] == [None], "its copy of the weights stays until garbage is looked for"
    finally:
        gc.enable()
    assert " for rows 3" not in module.explain_program("infer").because


def test_engine_that_is_not_installed_is_left_out_with_its_reason(words, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    told = load(words).explain_program("infer")
    assert told.why_not["openvino"] == "target `openvino` needs OpenVINO: `pip install 'aotexport-runtime[openvino]'`"


# --- packed layers ------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.Conv2d(channels, channels, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels, affine=False)])

    def forward(self, x):
        first = (self.norms[0](self.one(x)) + self.norms[1](self.two(x))).relu() + x
        return nn.functional.hardswish(self.two(first) + first)


class Layers(nn.Module):
    """Layers of every kind, each with what follows it, and constants that a caller gets."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish())
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.residual = Residual(8)
        self.line = nn.Conv1d(8, 64, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.inner, self.plain = nn.Linear(64, 1024), nn.Linear(1024, 64, bias=False)
        self.bias = nn.Parameter(torch.randn(64))
        self.activations = nn.ModuleList(
            [
                *(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid(), nn.SiLU(), nn.GELU(), nn.ReLU6()),
                *(nn.GELU("tanh"), nn.Hardtanh(-0.5, 0.5), nn.LeakyReLU(0.2), nn.Softplus()),
            ]
        )
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.running_mean)

    def forward(self, x):
        x = self.residual(self.deep(self.stem(x)).sigmoid())
        rows = self.line(x.flatten(2)).transpose(1, 2)
        rows = nn.functional.linear(nn.functional.gelu(self.inner(rows)), self.plain.weight) + self.bias
        rows = rows * self.bias.cosh()
        activated = [activation(self.inner(rows)) for activation in self.activations]
        table, repeated = self.bias.exp(), self.bias.cos().expand(len(x), 64)
        means = self.deep(x).mean((2, 3)) @ self.line.weight.sum(2).T
        shifted = torch.addmm(self.inner(means), means, self.inner.weight.T)
        return x, self.up(x), rows, *activated, table, table[1:], repeated, means, shifted


def image(rows=2):
    return torch.linspace(-2, 2, rows * 3 * 144).reshape(rows, 3, 12, 12).sin()


@pytest.fixture(scope="module")
def layers(new_bundle):
    sizes = ({0: Dim("rows", min=1, max=8)},)
    return new_bundle(seeded(Layers).eval(), image(), programs="infer", dynamic_shapes=sizes)


def test_packed_layers_give_the_results_of_eager(layers):
    prefer(layers, "packed")
    module = load(layers)
    for rows in (2, 1, 8, 2):
        check(module, image(rows), model=seeded(Layers).eval())
    assert engine_of(module) == "packed"
    for result in run(module, image()):
        result.zero_()
    check(module, image(), model=seeded(Layers).eval())


def test_bundle_without_an_onnx_model_says_so(layers):
    assert load(layers).explain_program("infer").why_not["onnx"] == "the bundle has no ONNX model of it"


def test_layer_leaves_sums_of_other_shapes_and_shapes_beyond_the_most_to_operators(monkeypatch):
    monkeypatch.setattr(frozen, "_convolution", lambda *args: lambda *inputs: "packed")
    monkeypatch.setattr(frozen, "_SHAPES", 1)
    x, graph = torch.ones(1, 1, 4, 4), Graph(inputs=(), nodes=(), outputs=[])
    convolved = ["x", "w", None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    summed = Node(name="s", op="aten::add.Tensor", args=["c", "y"], meta=None)
    nodes = [Node(name="c", op=CONVOLUTION, args=convolved, meta=None), summed]
    layer = Layer(inputs=["x", "y"], weight="w", bias=None, nodes=nodes)
    call = frozen._layer(layer, {"w": torch.ones(1, 1, 1, 1)}, graph, Environment(), "")
    assert torch.equal(call(x, torch.ones(4)), x + 1)
    assert call(x, x) == "packed"
    assert torch.equal(call(x[:, :, :2], x[:, :, :2]), x[:, :, :2] * 2)


def test_every_layer_of_a_graph_is_packed_with_what_follows(layers):
    program = open_bundle(layers).program("infer")
    graph = open_bundle(layers).graph("infer", program.functional.file)
    whole = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
    states = [graph.inputs[i].name for i, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
    metas = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    found, rest, constants = layered(whole, metas, constants_of(whole, states, set()), sums=True)
    followed = Counter(node.op.partition("::")[2].partition(".")[0] for node in rest.nodes)
    # A transposed convolution, softplus, a sum with a matrix, and the second sum of a residual block stay.
    assert followed["convolution"] == followed["softplus"] == followed["addmm"] == followed["add"] == 1
    assert not followed.keys() & {"relu", "gelu", "_native_batch_norm_legit_no_training"}
    assert sum(len(layer.inputs) == 2 for layer in found.values()) == 2
    assert followed["hardswish"] == 1  # After a sum, oneDNN has `relu` alone.
    assert followed["layer"] == len(found) == 10 + len(seeded(Layers).eval().activations)
    assert [name.partition("_")[0] for name in constants] == ["cos", "cosh", "permute", "permute"]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with instructions for bfloat16"
)
def test_layers_in_bfloat16_are_asked_for_and_tell_their_error(layers):
    module = aotexport_runtime.load(layers, frozen="bfloat16")
    for got, expected in zip(run(module, image()), run(seeded(Layers).eval(), image()), strict=True):
        assert got.dtype == expected.dtype
        assert 0 <= (got - expected).abs().max() <= 4e-2 * expected.abs().max()
    told = module.explain_program("infer")
    assert engine_of(module) == "packed"
    assert "bfloat16 has a relative error of " in told.because


def test_unknown_precision_of_frozen_weights_is_refused(layers):
    with pytest.raises(NotSupported, match="there is bfloat16"):
        aotexport_runtime.load(layers, frozen="int3")
