"""Programs that the user describes, methods beside `forward`, and several signatures of one program."""

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport import Example, Program
from aotexport_runtime import CallInvalid, NotSupported
from tests.refusals import refusal


class Coder(nn.Module):
    """An encoder and a decoder, and a flag, an optional mask and a nested batch that Python branches on."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(6, 3)
        self.up = nn.Linear(3, 6)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, mask=None, *, scaled=False):
        self.calls.add_(1)
        code = self.encode(x if mask is None else x * mask)
        return self.decode(code) * 2 if scaled else self.decode(code)

    def encode(self, x):
        return self.dropout(self.down(x)).tanh()

    def decode(self, code):
        return self.up(code)


@pytest.fixture(scope="module")
def coder():
    torch.manual_seed(0)
    return Coder()


@pytest.fixture(scope="module")
def bundle(coder, new_bundle):
    rows = torch.export.Dim("rows", min=2, max=64)
    x = torch.randn(4, 6)
    return new_bundle(
        coder,
        x,
        dynamic_shapes=({0: rows},),
        programs=[
            "train",
            "infer",
            Program("encode", method="encode"),
            Program("encode-train", mode="train", grad=True, method="encode"),
            Program(
                "decode",
                grad=True,
                method="decode",
                example=Example((torch.randn(2, 3),), dynamic_shapes={}),
                variants=[(torch.randn(3),)],
            ),
        ],
        variants=[
            {"x": x, "scaled": True},
            Example((torch.randn(3, 4, 6), torch.ones(3, 4, 6)), dynamic_shapes=({0: rows}, {0: rows})),
        ],
    )


@pytest.fixture
def loaded(bundle):
    return aotexport_runtime.load(bundle)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.randn(4, 6),), {}),
        ((torch.randn(9, 6),), {}),
        ((torch.randn(4, 6),), {"scaled": True}),
        ((torch.randn(5, 4, 6), torch.rand(5, 4, 6)), {}),
    ],
    ids=["example", "dynamic", "flag", "mask"],
)
def test_call_runs_the_variant_that_it_fits(coder, loaded, training, args, kwargs):
    results = []
    for module in (coder.train(training), loaded.train(training)):
        module.zero_grad()
        torch.manual_seed(3)
        output = module(*args, **kwargs)
        output.square().mean().backward()
        results.append((output, [parameter.grad for parameter in module.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_call_that_fits_no_variant_says_per_variant_why(loaded):
    assert refusal(CallInvalid, loaded.eval(), torch.randn(4, 6), torch.ones(4, 6), scaled=True) == (
        "the call does not fit program `infer`:\n"
        "  - variant `infer`: `mask`: expected None, as at capture, got a tensor float32[4, 6]\n"
        "  - variant `infer`: `scaled`: expected False, as at capture, got True\n"
        "  - variant `infer.2`: `mask`: expected None, as at capture, got a tensor float32[4, 6]\n"
        "  - variant `infer.3`: `scaled`: expected False, as at capture, got True"
    )


def test_call_with_one_tensor_twice_runs_the_variant_that_was_captured_so(load):
    def model(x, y):
        return x * 2 if x is y else x + y

    x = torch.randn(3)
    loaded, y = load(model, x, x + 1, variants=[(x, x), {"x": x[:2], "y": x[:2] + 1}], target="auto"), torch.randn(3)
    assert torch.equal(loaded(y, y), y * 2)
    assert torch.equal(loaded(y, x), y + x)
    with pytest.raises(CallInvalid, match=r"(?s)variant `infer`: .*variant `infer.2`: .*variant `infer.3`: "):
        loaded(y.double(), y)


def same(x, y):
    return x is y


def asks(x, y):
    return x * 2 if same(x, y) else x + y


def test_call_with_one_tensor_twice_is_served_where_code_does_not_ask(load):
    x = torch.randn(3)
    assert torch.equal(load(torch.add, x, x + 1)(x, x), x + x)


def test_call_with_one_tensor_twice_is_refused_where_code_asks_and_no_variant_was_captured_so(load):
    x = torch.randn(3)
    module = load(asks, x, x + 1)
    assert torch.equal(module(x, x.clone()), x + x)
    with pytest.raises(CallInvalid, match=r"`y`: expected another tensor than `x`, as at capture, .* one object"):
        module(x, x)


def test_captured_methods_are_methods_of_the_loaded_module(coder, loaded):
    x, code = torch.randn(7, 6), torch.randn(2, 3, requires_grad=True)
    coder.eval(), loaded.eval()
    assert torch.equal(loaded.encode(x), coder.encode(x))
    assert torch.equal(loaded.decode(code.detach()[0]), coder.decode(code.detach()[0]))
    got, expected = (
        torch.autograd.grad(module.decode(code).square().sum(), [code, *module.up.parameters()])
        for module in (loaded, coder)
    )
    assert all(map(torch.equal, got, expected))
    torch.manual_seed(5)
    trained = loaded.train().encode(x)
    torch.manual_seed(5)
    assert torch.equal(trained, coder.train().encode(x))


def test_method_without_a_program_is_refused(loaded):
    with pytest.raises(AttributeError, match="object has no attribute 'refine'"):
        loaded.refine(1)
    with pytest.raises(NotSupported, match="the bundle has only `decode` \\(eval mode\\)"):
        loaded.train().decode(torch.randn(2, 3))


def test_bound_method_is_exported_with_the_state_of_its_module(coder, load):
    loaded = load(coder.decode, torch.randn(2, 3), programs=["infer"], target="auto")
    assert "up.weight" in dict(loaded.named_parameters())
    code = torch.randn(2, 3)
    assert torch.equal(loaded(code), coder.eval().decode(code))


def test_bundle_of_methods_alone_refuses_to_be_called(coder, tmp_path):
    programs = [Program("decode", method="decode", example=(torch.randn(2, 3),))]
    aotexport.export(coder, (torch.randn(2, 6),), programs=programs, output=tmp_path / "decode", verify=False)
    with pytest.raises(NotSupported, match="the bundle has no program of `forward`, only of `decode`"):
        aotexport_runtime.load(tmp_path / "decode")(torch.randn(2, 6))


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([Program("a/b")], "program name 'a/b': use letters, digits, `_`, `.` and `-`, at most 64, a letter"),
        (["infer", Program("infer", grad=True)], "two programs are called `infer`"),
        ([], "no programs were asked for"),
    ],
    ids=["name", "twice", "none"],
)
def test_wrong_programs_are_refused_by_name(coder, tmp_path, programs, message):
    with pytest.raises(aotexport.ModelFileInvalid, match=message.replace("(", "\\(")):
        aotexport.export(coder, (torch.randn(2, 6),), programs=programs, output=tmp_path / "refused")


def test_module_with_one_mode_is_exported_in_it(tmp_path):
    x = torch.randn(3, 4)
    module = torch.export.export(nn.Sequential(nn.Linear(4, 2), nn.Dropout()).eval(), (x,)).module()
    loaded = aotexport_runtime.load(aotexport.export(module, (x,), output=tmp_path / "bundle", verify=False).path)
    assert torch.equal(loaded(x), module(x))
    assert torch.equal(loaded.eval()(x), module(x))
