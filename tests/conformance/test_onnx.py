"""ONNX models of bundles: made from the forward graph alone, run by ONNX Runtime, equal to eager."""

import math
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import aotexport
import aotexport_runtime
from aotexport import ExportFailed, OnnxOptions, VerificationFailed
from aotexport_runtime import CheckFailed, NotSupported
from tests.hostile.crafted import Crafted
from tests.models import module, seeded
from tests.scaled import ScaledInt8

BATCH = Dim("batch", min=1, max=64)


class Tied(nn.Module):
    """Tied and transposed weights, a buffer, a constant above 1 KB, nested inputs and named outputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch, *, bias=None):
        table = torch.arange(300.0).reshape(75, 4).sin().sum(0)
        hidden = self.norm(self.embed(batch["ids"]) @ self.turned * self.scale) + table
        hidden = hidden if bias is None else hidden + bias
        return {"hidden": hidden, "logits": (self.head(hidden),), "size": batch["ids"].shape[0]}


def tied_call(size=3):
    ids = torch.arange(size) % 7
    return ({"ids": ids},), {"bias": torch.linspace(-1, 1, 4 * size).reshape(size, 4)}


def export(model, args, kwargs=None, *, output, **options):
    return aotexport.export(model, args, kwargs, output=output, programs="infer", **options)


def export_alone(model, args, *, output, options=None, programs="infer", **more):
    """Return how the ONNX models of a new bundle compare; its other programs are not verified again."""
    aotexport.export(model, args, output=output, programs=programs, verify=False, **more)
    return aotexport.export_onnx(output, options)[1]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "tied"
    args, kwargs = tied_call()
    sizes = {"batch": {"ids": {0: BATCH}}, "bias": {0: BATCH}}
    report = export(seeded(Tied).eval(), args, kwargs, output=path, dynamic_shapes=sizes, onnx=True, shard_nbytes=64)
    assert {c.target for c in report.comparisons} == {"autograd", "portable", "onnx"} - {"autograd"}
    return path


@pytest.mark.parametrize("size", [1, 3, 40])
def test_onnx_engine_gives_the_values_and_structure_of_eager(tied, size):
    args, kwargs = tied_call(size)
    with torch.no_grad():
        expected = seeded(Tied).eval()(*args, **kwargs)
    module = aotexport_runtime.load(tied, target="onnx")
    got = module(*args, **kwargs)
    assert list(got) == ["hidden", "logits", "size"]
    assert got["size"] == size
    torch.testing.assert_close(got["hidden"], expected["hidden"])
    torch.testing.assert_close(got["logits"], expected["logits"])
    arrays = module({"ids": args[0]["ids"].numpy()}, bias=kwargs["bias"].numpy())
    assert type(arrays["hidden"]) is np.ndarray
    np.testing.assert_array_equal(arrays["hidden"], got["hidden"].numpy())


def test_arrays_of_any_layout_and_byte_order_are_taken_by_value(tied):
    module = aotexport_runtime.load(tied, target="onnx")
    ids, bias = np.arange(3), np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    expected = module({"ids": ids}, bias=bias)["hidden"]
    for turned in (bias.astype(">f4"), np.asfortranarray(bias), bias[::-1].copy()[::-1]):
        np.testing.assert_array_equal(module({"ids": ids.astype(">i8")}, bias=turned)["hidden"], expected)


def test_model_names_inputs_outputs_and_sizes_as_the_call_does(tied):
    model = onnx.load(tied / "model.onnx", load_external_data=False)
    assert [value.name for value in model.graph.input] == ["batch.ids", "bias"]
    assert [value.name for value in model.graph.output] == ["hidden", "logits.0", "size"]
    assert model.graph.input[1].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {prop.key: prop.value for prop in model.metadata_props}["aotexport.program"] == "infer"
    sources = {prop.value for node in model.graph.node for prop in node.metadata_props if prop.key.endswith("source")}
    assert any(source.startswith("tests/conformance/test_onnx.py:") for source in sources)


def test_initialisers_lie_in_the_files_of_the_bundle_and_checkers_accept_them(tied):
    onnx.checker.check_model(tied / "model.onnx", full_check=True)
    model = onnx.load(tied / "model.onnx", load_external_data=False)
    places = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
    assert {"embed.weight", "turned", "scale", "norm.running_mean"} <= set(places)
    assert "head.weight" not in places
    manifest = aotexport_runtime.open_bundle(tied).manifest
    listed = {entry.path for entry in manifest.files}
    assert len({entry.file for entry in manifest.state}) > 1
    for name, place in places.items():
        if place:
            assert place["location"] in listed, name
    (entry,) = [entry for entry in manifest.state if entry.name == "scale"]
    data = (tied / entry.file).read_bytes()
    begin = int(places["scale"]["offset"])
    np.testing.assert_array_equal(
        np.frombuffer(data[begin : begin + 16], np.float32), load_file(tied / entry.file)["scale"]
    )
    assert [entry.targets for entry in manifest.programs] == [("portable", "onnx")]


def test_tuned_bundle_gives_the_tuned_predictions(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    sizes = ({0: Dim("batch", min=2, max=64)},)
    path = tmp_path / "bundle"
    aotexport.export(network, (torch.randn(6, 4),), output=path, dynamic_shapes=sizes, onnx=True, verify=False)
    module = aotexport_runtime.load(path)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    aotexport_runtime.save(module, tmp_path / "tuned")
    assert (tmp_path / "tuned/model.onnx").read_bytes() == (path / "model.onnx").read_bytes()
    x = torch.randn(5, 4)
    with torch.no_grad():
        expected = module.eval()(x)
    original = aotexport_runtime.load(path, target="onnx")
    before = original(x)
    torch.testing.assert_close(aotexport_runtime.load(tmp_path / "tuned", target="onnx")(x), expected)
    assert not torch.allclose(before, expected)
    assert str(original.explain()) == (
        "target onnx\n"
        "program train: refused: the bundle has no ONNX model of `train`; it has one of infer\n"
        "program infer on CPUExecutionProvider: onnx (ONNX Runtime)"
    )


def test_onnx_engine_imports_no_torch_for_arrays(tied):
    code = f"""
import sys, numpy, aotexport_runtime
module = aotexport_runtime.load({str(tied)!r}, target="onnx")
module({{"ids": numpy.arange(3)}}, bias=numpy.ones((3, 4), numpy.float32))
assert not any(name.partition(".")[0] in ("torch", "safetensors", "aotexport", "onnx") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_onnx_engine_refuses_gradients_and_bundles_without_models(tied, tiny):
    args, kwargs = tied_call()
    with pytest.raises(NotSupported, match="requires grad, and ONNX models record no gradients"):
        aotexport_runtime.load(tied, target="onnx")(*args, bias=kwargs["bias"].requires_grad_())
    with pytest.raises(NotSupported, match=r"^the bundle has no ONNX models; add them with `aotexport onnx`"):
        aotexport_runtime.load(tiny, target="onnx")


# --- what has no model ------------------------------------------------------------------------------------


def counting(self, x):
    self.calls.add_(x.sum())
    return x * self.calls


def test_program_that_changes_state_is_refused_or_returns_it(tmp_path):
    bundle = tmp_path / "bundle"
    export(module(counting, calls=torch.zeros(2)), (torch.ones(2),), output=bundle, verify=False)
    before = (bundle / "bundle.json").read_bytes()
    with pytest.raises(
        ExportFailed, match=r"^program `infer` changes `calls`, and ONNX models change nothing"
    ) as caught:
        aotexport.export_onnx(bundle)
    assert "--onnx-state=outputs" in str(caught.value)
    assert (bundle / "bundle.json").read_bytes() == before
    manifest, _ = aotexport.export_onnx(bundle, OnnxOptions(state="outputs"))
    assert (manifest.onnx[0].outputs, manifest.onnx[0].updates) == (("output", "calls.after"), ("calls",))
    assert manifest.onnx[0].state_inputs == {"calls": "calls"}
    import onnxruntime

    session = onnxruntime.InferenceSession(bundle / "model.onnx")
    output, calls = session.run(None, {"x": np.ones(2, np.float32)})
    assert (output.tolist(), calls.tolist()) == ([2, 2], [2, 2])
    output, calls = session.run(None, {"x": np.ones(2, np.float32), "calls": calls})
    assert (output.tolist(), calls.tolist()) == ([4, 4], [4, 4])


# --- programs that change something, run by the engine ----------------------------------------------------


class Cache(nn.Module):
    """Methods that share state: written in place, replaced, and only read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("total", torch.zeros(3))
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x, at):
        self.rows.index_copy_(0, at, (x @ self.weight).unsqueeze(0))
        self.total = self.total + self.rows.sum(0)
        return self.rows * 2, self.total

    def look(self, x):
        return x + self.rows.sum(0) - self.total


STATE_OUTPUTS = OnnxOptions(state="outputs")


def test_changed_state_is_kept_for_the_calls_and_programs_to_come(tmp_path):
    torch.manual_seed(0)
    model, x = Cache().eval(), torch.randn(3)
    programs = ["infer", aotexport.Program("look", method="look", example=(x,))]
    bundle = tmp_path / "bundle"
    export_alone(model, (x, torch.tensor([0])), output=bundle, programs=programs, options=STATE_OUTPUTS)
    tensors, arrays = (aotexport_runtime.load(bundle, target="onnx") for _ in range(2))
    assert tensors.state == {}
    for step in range(4):
        x, at = torch.randn(3), torch.tensor([step])
        with torch.no_grad():
            expected, seen = model(x, at), model.look(x)
        torch.testing.assert_close(tensors(x, at), expected)
        torch.testing.assert_close(tensors.look(x), seen)
        got = arrays(x.numpy(), np.array([step]))
        assert all(type(value) is np.ndarray for value in (*got, *arrays.state.values()))
        np.testing.assert_allclose(got[1], expected[1].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(arrays.look(x.numpy()), seen.numpy(), rtol=1e-5, atol=1e-5)
    assert sorted(tensors.state) == ["rows", "total"]
    torch.testing.assert_close(tensors.state["rows"], model.rows)
    tensors.state.clear()
    torch.testing.assert_close(tensors.look(x), x)


def test_branch_on_values_holds_or_is_refused(tmp_path):
    sizes = ({0: BATCH},)
    export_alone(_branch, (torch.ones(3, 4),), output=tmp_path / "bundle", dynamic_shapes=sizes)
    module = aotexport_runtime.load(tmp_path / "bundle", target="onnx")
    assert module(np.ones((2, 4), np.float32)).tolist() == [[2] * 4] * 2
    message = r"^tests/conformance/test_onnx.py:\d+: the values of this call lead another way through the code"
    with pytest.raises(CheckFailed, match=message):
        module(np.full((2, 4), 50, np.float32))
    (model,) = module.bundle.manifest.onnx
    assert (model.outputs, len(model.checks)) == (("output", "check.0"), 1)


def _accumulate(x, y, z):
    x.add_(y)
    z.mul_(2)
    return x * 2


@pytest.fixture(scope="module")
def accumulate(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "accumulate"
    args = torch.ones(3), torch.ones(3), torch.ones(2, dtype=torch.complex64)
    export_alone(_accumulate, args, output=path, options=STATE_OUTPUTS)
    return path


def test_changed_arguments_are_written_to(accumulate):
    module = aotexport_runtime.load(accumulate, target="onnx")
    values = torch.zeros(3), torch.ones(3), torch.full((2,), 1j)
    for step in (1, 2):
        assert module(*values).tolist() == [2 * step] * 3
    assert [value.tolist() for value in values] == [[2] * 3, [1] * 3, [4j] * 2]
    x, y, z = np.zeros(3, np.float32), np.ones(3, np.float32), np.full(2, 1j, np.complex64)
    assert module(x, y, z).tolist() == [2] * 3
    assert (x.tolist(), z.tolist()) == ([1] * 3, [2j] * 2)


def test_arguments_that_cannot_be_written_to_are_refused(accumulate):
    module = aotexport_runtime.load(accumulate, target="onnx")
    x, z = np.zeros(4, np.float32), np.ones(2, np.complex64)
    with pytest.raises(NotSupported, match=r"^the program changes `x`, which shares memory with `y`, and the model"):
        module(x[1:], x[:3], z)
    tensor = torch.zeros(3)
    with pytest.raises(NotSupported, match=r"^the program changes `x`, which shares memory with `y`, and the model"):
        module(tensor, tensor, torch.from_numpy(z))
    x.flags.writeable = False
    with pytest.raises(NotSupported, match=r"^the program changes `x`, which is a read-only array$"):
        module(x[:3], np.ones(3, np.float32), z)


def _transposes_in_place(x):
    return x.mul_(2).t_() + 1


def test_changes_without_an_onnx_form_are_refused(tmp_path):
    with pytest.raises(ExportFailed, match="changes values and sizes of a tensor at once, which has no ONNX form"):
        export_alone(_transposes_in_place, (torch.ones(3, 4),), output=tmp_path / "sizes", options=STATE_OUTPUTS)
    x = torch.ones(4)
    with pytest.raises(ExportFailed, match="program `infer` changes `kept` of its caller, and ONNX models"):
        export_alone(lambda x, kept: kept.append(x * 2) or x + 1, (x, []), output=tmp_path / "container")
    with pytest.raises(VerificationFailed, match=r"^ONNX Runtime disagrees with eager execution; nothing was written"):
        export_alone(lambda x, y: x.mul_(2) + y, (x[1:], x[:3]), output=tmp_path / "memory", options=STATE_OUTPUTS)


def _random(x):
    return x + torch.rand_like(x)


def _branch(x):
    return x + 1 if x.sum() < 100 else x.sin()


def _checked(x):
    torch._check(x.max().item() < 100)
    return x.sin()


def _data(x):
    y = x.clone()
    y.data = x[:2].sin()
    return y + 1


def _median(x):
    return x.median(dim=0).values


def _steps(x):
    for _ in range(4):
        x = torch.relu(x) + 1
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.t(), "program `infer` returns `output` as a view of `x`, and ONNX models change nothing. "),
        (_random, "operator `aten::rand_like.default` (tests/conformance/test_onnx.py:"),
        (
            lambda x: torch.cond(x.sum() > 0, _checked, lambda x: x.cos(), (x,)),
            "a branch or loop body checks a value, which has no translation to ONNX: tests/conformance/test_onnx.py:",
        ),
        (_data, "operator `aten::set_data.default` (tests/conformance/test_onnx.py:"),
        (_median, "operator `aten::median.dim` (tests/conformance/test_onnx.py:"),
    ],
)
def test_program_without_an_onnx_form_is_refused_by_name(tmp_path, function, message):
    with pytest.raises(ExportFailed) as caught:
        export(function, (torch.randn(3, 4),), output=tmp_path / "bundle", onnx=True, verify=False)
    assert str(caught.value).startswith(message)
    assert ("draws random numbers" in str(caught.value)) == (function is _random)
    assert not (tmp_path / "bundle").exists()


def test_wrong_model_is_left_out(tmp_path):
    from onnxscript import opset20 as op

    def relu(self):
        return op.Log(op.Neg(self))

    options = OnnxOptions(translations={torch.ops.aten.relu.default: relu})
    report = export(_steps, (torch.linspace(0, 1, 12).reshape(3, 4),), output=tmp_path / "bundle", onnx=options)
    (note,) = (note.text for note in report.notes if "ONNX" in note.text)
    assert note.startswith("program infer has no ONNX model: infer/example (onnx): call 0: ")
    assert (report.manifest.onnx, (tmp_path / "bundle/model.onnx").exists()) == ((), False)
    assert {result.target for result in aotexport_runtime.selftest(tmp_path / "bundle")} == {"autograd", "portable"}
    with pytest.raises(VerificationFailed, match=r"^ONNX Runtime disagrees with eager execution; nothing was written:"):
        aotexport.export_onnx(tmp_path / "bundle", options)


def test_operator_that_onnx_runtime_does_not_take_is_refused_with_its_line(tmp_path):
    with pytest.raises(VerificationFailed) as caught:
        export_alone(lambda x: x + x.roll(1), (torch.tensor([True, False]),), output=tmp_path / "bundle")
    assert "`node_add` is torch's `aten::add.Tensor` (tests/conformance/test_onnx.py:" in str(caught.value)


def test_sum_that_cancels_is_judged_by_the_error_of_float32(tmp_path):
    x = torch.linspace(-1, 1, 4097) ** 3
    found = export_alone(lambda x: (1e3 * x).sum() + 1, (x,), output=tmp_path / "bundle")
    assert {comparison.agrees for comparison in found} == {True}


# --- kinds of programs ------------------------------------------------------------------------------------


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0) * 2

    @staticmethod
    def backward(ctx, grad):
        torch._check(grad.amax().item() < 1e9)
        return grad * 3


class Branches(nn.Module):
    """Branches with weights of their own."""

    def __init__(self):
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.yes(x).relu(), lambda x: self.no(x).sin(), (x,))


class Recurrence(nn.Module):
    """A scan whose step has weights, and that begins at a part of a tensor."""

    def __init__(self):
        super().__init__()
        self.step, rows = nn.Linear(4, 4), torch.linspace(0, 1, 8)
        self.whole, self.part = nn.Buffer(rows), nn.Buffer(rows[4:])

    def forward(self, x):
        return scan(lambda carry, row: ((self.step(row) + carry).tanh(), carry + row), self.part, x * self.whole[7])


def _half(x):
    return nn.functional.gelu(x @ x.t())


def _attend(x):
    return nn.functional.scaled_dot_product_attention(x, x, x)


def _mapped(x):
    return torch_map(lambda row, shift: ((row * shift).sin(), row.sum()), x, x.sum(0))


def _chosen(x):
    return torch.masked_select(x, x[0] > 0), x.sort(stable=True, descending=True)


def _sums(x):
    return x.sum(), x.cumsum(1), x.amax(0)


def _loop(x):
    return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))[1]


KINDS = {
    "attention": (lambda: _attend, torch.linspace(-1, 1, 24).reshape(2, 3, 4)),
    "while_loop": (lambda: _loop, torch.linspace(-1, 1, 4)),
    "branches": (Branches, torch.linspace(-1, 1.5, 12).reshape(3, 4)),
    "scan": (Recurrence, torch.linspace(-1, 1.5, 12).reshape(3, 4)),
    "custom": (lambda: lambda x: _Triple.apply(x) + 1, torch.linspace(-1, 1.5, 12).reshape(3, 4)),
    "selected": (lambda: lambda x: x[x > 0] * 2, torch.linspace(-1, 1.5, 12)),
    "map": (lambda: _mapped, torch.linspace(-1, 1.5, 12).reshape(3, 4)),
    "chosen": (lambda: _chosen, torch.tensor([[1.0, -1, 1, 0], [2, 2, -3, 2]])),
    "sums_of_float16": (lambda: _sums, torch.linspace(-1, 1.5, 12, dtype=torch.float16).reshape(3, 4)),
    "float16": (lambda: _half, torch.linspace(-1, 1.5, 12, dtype=torch.float16).reshape(3, 4)),
}


ALONE = ("branches", "scan", "custom")
"""What a trace follows in a model of its own alone."""


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param([name], marks=[pytest.mark.slow] * (name != "scan")) for name in ALONE),
        [name for name in KINDS if name not in ALONE],
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_programs_of_every_kind_equal_eager_in_onnx_runtime(tmp_path, names):
    torch.manual_seed(0)
    kinds = {name: KINDS[name][0]() for name in names}
    modules = {name: kind for name, kind in kinds.items() if isinstance(kind, nn.Module)}
    model = module(lambda self, given: {name: kinds[name](x) for name, x in given.items()}, **modules)
    model, given = (
        (kinds[names[0]], KINDS[names[0]][1]) if len(names) == 1 else (model, {n: KINDS[n][1] for n in names})
    )
    found = export_alone(model, (given,), output=tmp_path / "bundle")
    assert all(comparison.agrees and math.isfinite(comparison.absolute) for comparison in found)
    compared = [comparison.name for comparison in found]
    assert [name for name in names if sum(f"['{name}']" in each or len(names) == 1 for each in compared) < 2] == []


class Wrapped(nn.Module):
    """A linear layer whose weight is a tensor of a class: 8-bit integers and a scale per row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.linear.weight = nn.Parameter(ScaledInt8.of(torch.randn(6, 4)), requires_grad=False)

    def forward(self, x):
        return self.linear(x).relu()


def test_weights_of_a_tensor_subclass_are_parts_of_the_bundle(tmp_path):
    torch.manual_seed(0)
    model, x = Wrapped(), torch.randn(3, 4)
    found = export_alone(model, (x,), output=tmp_path / "bundle", dynamic_shapes=({0: BATCH},))
    assert {comparison.vector for comparison in found} >= {"batch-is-1", "other-sizes"}
    proto = onnx.load(tmp_path / "bundle/model.onnx", load_external_data=False)
    parts = {t.name: t.data_type for t in proto.graph.initializer if t.external_data}
    assert parts["linear.weight.integers"] == onnx.TensorProto.INT8
    module = aotexport_runtime.load(tmp_path / "bundle", target="onnx")
    torch.testing.assert_close(module(x), model(x).detach())


def test_other_indices_of_equal_values_are_no_difference(tmp_path):
    x = torch.tensor([1.0, 2, 2, 1, 0, 2, 1, 2]).repeat(3, 1000)
    found = export_alone(lambda x: (x.topk(3, dim=1), x.argsort(1)), (x,), output=tmp_path / "bundle")
    assert any(comparison.name.endswith(" (of equal values)") for comparison in found)


@pytest.mark.parametrize("function", [lambda x: x.topk(2)[1], lambda x: x.sum().sort()[1]])
def test_other_indices_of_other_values_are_a_difference(tmp_path, function):
    from onnxscript import opset20 as op

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
        return op.TopK(self, op.Constant(value_ints=[k]), axis=dim, largest=0)

    def sort(self, dim: int = -1, descending: bool = False):
        return op.Identity(self), op.Constant(value_int=1)

    options = OnnxOptions(translations={torch.ops.aten.topk.default: topk, torch.ops.aten.sort.default: sort})
    with pytest.raises(VerificationFailed, match=r"call 0: output: largest absolute difference"):
        export_alone(function, (torch.randn(3, 8),), output=tmp_path / "bundle", options=options)


def _network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval().to(dtype)


def test_bfloat16_is_verified_in_float32_and_runs_where_there_are_kernels(tmp_path):
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    found = export_alone(_network(x.dtype), (x,), output=tmp_path / "bundle")
    assert len(found) == 2
    assert all(0 < comparison.error < 0.02 for comparison in found)
    model = onnx.load(tmp_path / "bundle/model.onnx", load_external_data=False)
    assert {tensor.data_type for tensor in model.graph.initializer if tensor.external_data} == {
        onnx.TensorProto.BFLOAT16
    }
    with pytest.raises(NotSupported, match=r"NOT_IMPLEMENTED .* no such kernel for the types of the model, bfloat16"):
        aotexport_runtime.load(tmp_path / "bundle", target="onnx")


def test_type_without_kernels_is_refused_or_written_unverified(tmp_path):
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.raises(VerificationFailed, match=r"NOT_IMPLEMENTED .*`--no-verify` writes the model as it is$"):
        export_alone(_network(x.dtype), (x,), output=tmp_path / "bundle")
    aotexport.export_onnx(tmp_path / "bundle", verify=False)
    onnx.checker.check_model(tmp_path / "bundle/model.onnx", full_check=True)


# --- broken bundles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [("offset", "1000000000"), ("length", "4"), ("offset", "-8")])
def test_model_that_refers_past_its_files_is_refused(tied, tmp_path, key, value):
    crafted = Crafted(tied, tmp_path / "bundle")
    model = onnx.load(tied / "model.onnx", load_external_data=False)
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == key]
    entries[0].value = value
    crafted.write("model.onnx", model.SerializeToString())
    with pytest.raises(NotSupported, match=r"^ONNX Runtime .* does not load `model.onnx`: "):
        aotexport_runtime.load(crafted.seal(), target="onnx")
