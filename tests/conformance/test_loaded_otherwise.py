"""Bundles loaded in another dtype, and with taps: to the bit as the model in that dtype, and with hooks, does."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import aotexport
from aotexport import Program
from aotexport_runtime import ArgumentInvalid, NotSupported, SelfTestFailed, load, open_bundle, save, selftest
from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.commands.results import describe_graphs
from tests.hostile.crafted import Crafted
from tests.models import seeded

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


class Attention(nn.Module):
    """Operators of all kinds that take the dtypes of their operands, one weight under two names, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.qkv = nn.Linear(8, 24)
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids, scale, mask=None):
        self.calls.add_(1)
        x = self.embed(ids)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.dropout(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)) * scale
        x = self.norms[1](x) / ids.shape[1]
        return {"logits": self.out(x), "positions": ids + 1, "x": x}


ARGUMENTS = (torch.randint(11, (3, 5)), torch.rand(8), torch.rand(3, 5, 5) > 0.3)


@pytest.fixture(scope="module")
def base(new_bundle):
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
    shapes = {"ids": {0: batch, 1: length}, "scale": None, "mask": {0: batch, 1: length, 2: length}}
    return new_bundle(seeded(Attention), *ARGUMENTS, dynamic_shapes=shapes)


def outcome(module, args):
    """Return everything that a training step shows."""
    torch.manual_seed(1)
    result = module(*args)
    result["logits"].float().pow(2).mean().backward()
    return [*result.values(), *(p.grad for p in module.parameters()), *module.buffers()]


def cast(args, dtype):
    return [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]


# --- dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [*zip(DTYPES, [(3, 5), (2, 7), (3, 5)], strict=True)])
def test_bundle_loaded_in_another_dtype_is_the_cast_model_to_the_bit(base, dtype, size):
    args = cast((torch.randint(11, size), torch.rand(8), torch.rand(*size, size[1]) > 0.3), dtype)
    module, model = load(base, dtype=dtype), seeded(Attention).to(dtype)
    for got, expected in zip(outcome(module, args), outcome(model, args), strict=True):
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)
    assert module.out.weight is module.embed.weight
    assert torch.equal(module.eval()(*args)["x"], model.eval()(*args)["x"])
    assert "another dtype" not in str(module.explain())
    assert f"it was loaded in {str(dtype).removeprefix('torch.')}, for which it has none" in str(module.explain())


def test_cast_module_is_exported_and_not_saved(base, tmp_path, new_bundle):
    module = load(base, dtype=torch.bfloat16)
    with pytest.raises(NotSupported, match=r"^the module was loaded in bfloat16, and `save` writes the programs"):
        save(module, tmp_path / "saved")
    again, args = load(new_bundle(module, *cast(ARGUMENTS, torch.bfloat16))), cast(ARGUMENTS, torch.bfloat16)
    assert torch.equal(again.eval()(*args)["x"], seeded(Attention).bfloat16().eval()(*args)["x"])


class Recurrent(nn.Module):
    """A recurrent layer without a first state, over whole and packed sequences."""

    def __init__(self):
        super().__init__()
        self.into, self.layer = nn.Linear(4, 4), nn.GRU(4, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.layer(self.into(x))[0]

    def packed(self, x):
        lengths = torch.tensor([2, 3])
        packed = nn.utils.rnn.pack_padded_sequence(self.into(x), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def test_first_states_of_recurrent_layers_have_the_dtype_of_their_input(tmp_path):
    programs = ["infer", Program("packed", mode="eval", method="packed")]
    sizes, exported = {"x": {1: torch.export.Dim("steps")}}, seeded(Recurrent)
    options = {"programs": programs, "dynamic_shapes": sizes, "verify": False}
    aotexport.export(exported, (torch.rand(2, 3, 4),), output=tmp_path / "b", **options)
    for dtype in DTYPES:
        module, model = load(tmp_path / "b", dtype=dtype).eval(), copy.deepcopy(exported).to(dtype)
        for x in (torch.rand(2, 3, 4, dtype=dtype), torch.rand(2, 6, 4, dtype=dtype)):
            assert torch.equal(module(x), model(x))
            assert torch.equal(module.packed(x), model.packed(x))


class Names(nn.Module):
    """Code that asks for a dtype, or makes tensors and numbers in one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factors = torch.rand(4)

    def forward(self, x):
        return self.linear(x)

    def limit(self, x):
        return self.linear(x).masked_fill(x > 0, torch.finfo(x.dtype).min)

    def attribute(self, x):
        return self.linear(x) * self.factors

    def inside(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.linear(x).float(), lambda x: x + 1.0, (x,))


LINES = {name: Names.__dict__[name].__code__.co_firstlineno + 1 for name in Names.__dict__ if name[0] != "_"}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("limit", "has -3.4028234663852886e+38, a limit of float32, in `aten::masked_fill.Scalar`"),
        ("attribute", "reads the float32 tensor `factors` in `aten::mul.Tensor`"),
        ("inside", "names float32 in `aten::to.dtype`"),
    ],
)
def test_program_with_a_dtype_of_its_own_is_refused_with_its_line(method, what, tmp_path):
    programs = [aotexport.Program("only", mode="eval", method=method, grad=False)]
    aotexport.export(seeded(Names).eval(), (torch.rand(2, 4),), output=tmp_path / "b", programs=programs, verify=False)
    with pytest.raises(NotSupported) as caught:
        load(tmp_path / "b", dtype=torch.bfloat16)
    # Traces tell no lines of code inside of `cond`.
    where = "" if method == "inside" else rf" at (.*/)?{Path(__file__).name}:{LINES[method]} in {method}"
    assert re.fullmatch(
        rf"`dtype`: program `only` {re.escape(what)}{where}\. Whether the model in another "
        r"dtype has the same there, the bundle does not tell\. Export the model in that dtype \(`--dtype bfloat16`\), "
        r"with `--autocast bfloat16` for loads in both, or convert it first \(`model\.to\(torch\.bfloat16\)`\)",
        str(caught.value),
    )


class Branching(Names):
    """Code that goes another way in another dtype, as the norms of T5 do."""

    def forward(self, x):
        out = self.linear(x).float()
        return out.to(self.linear.weight.dtype) * 2 if self.linear.weight.dtype == torch.bfloat16 else out


def test_load_in_the_dtype_of_autocast_is_the_cast_model_to_the_bit(tmp_path):
    model, x = seeded(Branching).eval(), torch.rand(2, 4)
    methods = ["forward", *(name for name in LINES if name not in ("forward", "inside"))]
    programs = [Program(name, mode="eval", method=name, grad=True) for name in methods]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = aotexport.export(
        model, (x,), output=tmp_path / "b", programs=programs, autocast="bfloat16", dynamic_shapes=({0: batch()},)
    )
    assert "loads in bfloat16 (`load(dtype=)`) run graphs captured in it" in [note.text for note in report.notes]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    trained = load(tmp_path / "b")
    with torch.no_grad():
        trained.linear.weight.mul_(2)
    save(trained, tmp_path / "saved")
    model = copy.deepcopy(model)
    for path in ("b", "saved"):
        if path == "saved":
            model.load_state_dict(trained.state_dict())
        lines = describe_graphs(selftest(tmp_path / path))
        assert sum(", forward graph in bfloat16 (autograd): ok, " in line for line in lines) == len(methods)
        assert faults_of(tmp_path / path) == []
        for dtype in (torch.bfloat16, torch.float32):
            loaded, own, x = load(tmp_path / path, dtype=dtype).eval(), copy.deepcopy(model).to(dtype), torch.rand(3, 4)
            for method in methods:
                results = [getattr(module, method)(x.to(dtype)) for module in (loaded, own)]
                assert results[0].dtype == results[1].dtype
                assert torch.equal(*results)
                gradients = [
                    torch.autograd.grad(result.sum(), module.linear.weight)[0]
                    for result, module in zip(results, (loaded, own), strict=True)
                ]
                assert torch.equal(*gradients)

    wrong = Crafted(tmp_path / "b", tmp_path / "wrong")
    file = "programs/forward/forward.bfloat16.json"
    wrong.write(file, wrong.root.joinpath(file).read_bytes().replace(b"aten::mul.Tensor", b"aten::div.Tensor"))
    with pytest.raises(SelfTestFailed, match=r"forward/example, forward graph in bfloat16 \(autograd\): .*output"):
        selftest(wrong.seal())


def batch():
    return torch.export.Dim("batch", max=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "`dtype`: expected one of bfloat16, float16, float32, float64, got int8"),
        ({"dtype": torch.bfloat16, "target": "onnx"}, "target `onnx` takes neither `dtype` nor `taps`"),
        ({"taps": ["out"], "target": "onnx"}, "target `onnx` takes neither `dtype` nor `taps`"),
    ],
)
def test_options_that_make_no_sense_are_refused(base, options, message):
    with pytest.raises(NotSupported, match=re.escape(message)):
        load(base, **options)


# --- taps -------------------------------------------------------------------------------------------------


def tapped_eagerly(model, paths, args):
    found = {}
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda m, a, result, path=path: found.update({path: result}))
    return model(*args), found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_taps_return_results_of_submodules_with_gradients(base, dtype):
    paths, args = ["norms.1", "qkv", "embed"], cast(ARGUMENTS, dtype or torch.float32)
    module, model = load(base, taps=paths, dtype=dtype), seeded(Attention).to(dtype or torch.float32)
    torch.manual_seed(1)
    result, taps = module(*args)
    torch.manual_seed(1)
    expected, found = tapped_eagerly(model, paths, args)
    assert list(taps) == paths
    assert all(torch.equal(taps[path], found[path]) for path in paths)
    (result["logits"].mean() + taps["qkv"].pow(2).sum()).backward()
    (expected["logits"].mean() + found["qkv"].pow(2).sum()).backward()
    for got, wanted in zip(module.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_taps_leave_programs_and_files_as_they_are(base, tmp_path):
    module = load(base, taps=["qkv"]).eval()
    result, taps = module(*ARGUMENTS)
    assert torch.equal(module.program("infer")(*ARGUMENTS)["x"], result["x"])
    twin = copy.deepcopy(module)
    assert torch.equal(twin(*ARGUMENTS)[1]["qkv"], taps["qkv"])
    save(module, tmp_path / "saved")
    assert all(result.agrees for result in selftest(tmp_path / "saved"))


class Twice(nn.Module):
    """A submodule that is called twice, and one that only train mode calls."""

    def __init__(self):
        super().__init__()
        self.shared, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.shared(self.shared(x).relu())
        return self.extra(x) if self.training else x


def test_taps_of_several_calls_are_a_list_and_of_none_are_left_out(new_bundle):
    module, x = load(new_bundle(seeded(Twice), torch.rand(2, 4)), taps=["shared", "extra"]), torch.rand(2, 4)
    result, taps = module(x)
    assert taps["extra"] is result
    assert torch.equal(taps["shared"][1], module.shared(module.shared(x).relu()))
    assert [*module.eval()(x)[1]] == ["shared"]


def test_tap_of_no_submodule_is_refused(base):
    with pytest.raises(ArgumentInvalid) as caught:
        load(base, taps=["norm.1"])
    assert str(caught.value) == "`taps`: no submodule `norm.1`; there are `norms.1`, `norms.0`, `norms`"
    with pytest.raises(
        NotSupported, match=r"^`taps`: the bundle does not tell what calls of `norms` return: .* than by"
    ):
        load(open_bundle(base), taps=["norms"])
