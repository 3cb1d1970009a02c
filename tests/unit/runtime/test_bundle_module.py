"""`BundleModule`: names, state, modes, copies and hooks, as the original module has them."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from aotexport_runtime import NotSupported, load
from tests.hostile.crafted import Crafted
from tests.refusals import refusal

TIED = Path(__file__).parents[2] / "golden/v1.0/tied_weights/bundle"


@pytest.fixture
def loaded(tiny):
    return load(tiny)


@pytest.fixture
def batch():
    return torch.linspace(-2, 2, 12).reshape(3, 4)


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


# --- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_with_one_name_of_a_tied_weight_loads(name, wrapped):
    module = load(TIED)
    outer = nn.ModuleDict({"inner": module}) if wrapped else module
    outer.load_state_dict({f"inner.{name}" if wrapped else name: torch.full((5, 3), 2.0)})
    assert module.head.weight is module.embedding.weight
    assert module(torch.tensor([0, 3, 3])).tolist() == [[12.0] * 5] * 3


def test_parameter_that_is_replaced_is_the_one_that_is_used(loaded, batch):
    loaded.linear.weight = nn.Parameter(torch.zeros(3, 4))
    loaded.linear.bias = nn.Parameter(torch.tensor([0.0, 7.0, 0.0]))
    assert loaded(batch)["best"].tolist() == [14.0, 14.0, 14.0]


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_conversion_to_another_dtype_is_refused_and_changes_nothing(loaded, batch, convert):
    with pytest.raises(NotSupported) as caught:
        getattr(loaded, convert)()
    name = {"half": "float16", "double": "float64"}.get(convert, convert)
    assert str(caught.value) == (
        f"the programs were captured with weights of float32, and do not hold for {name}. "
        "Load the bundle in that dtype (`load(..., dtype=)`), or export again"
    )
    assert loaded(batch)["best"].dtype is torch.float32


def test_notebook_shows_programs_and_modules_and_nothing_of_a_name_as_html(tiny, tmp_path):
    crafted = Crafted(tiny, tmp_path / "named")
    crafted.put("manifest", "name", "<script>alert(1)</script>")
    shown = load(crafted.seal())._repr_html_()
    for text in (
        "&lt;script&gt;alert(1)",
        "<summary>program train (train mode)",
        "inputs: x: float32[batch, 4]",
        "(linear): ",
    ):
        assert text in shown
    assert {*re.findall(r"<(\w+)", shown)} == {"b", "br", "details", "summary", "pre"}


# --- modes ------------------------------------------------------------------------------------------------


def only(tiny, tmp_path, program: str):
    """Return the small bundle with one of its programs, loaded."""
    crafted = Crafted(tiny, tmp_path / program)
    crafted.put("manifest", "programs", [{"name": program}])
    manifest = crafted.document("manifest")
    manifest["testvectors"] = []
    return load(crafted.seal())


@pytest.mark.parametrize(
    ("program", "train", "message"),
    [
        (
            "infer",
            True,
            "the module is in train mode, and the bundle has only `infer` (eval mode). "
            "Call `.eval()` first, or export a program for train mode",
        ),
        (
            "train",
            False,
            "the module is in eval mode, and the bundle has only `train` (train mode). "
            "Call `.train()` first, or export a program for eval mode",
        ),
    ],
)
def test_mode_without_a_program_is_refused_with_the_way_out(tiny, tmp_path, batch, program, train, message):
    module = only(tiny, tmp_path, program).train(train)
    assert refusal(NotSupported, module, batch) == message


# --- copies and hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dump", [pickle.dumps, copy.copy, lambda module: torch.save(module, io.BytesIO())])
def test_pickling_is_refused_with_the_way_out(loaded, dump):
    assert refusal(NotSupported, dump, loaded) == (
        "a loaded bundle is not pickled: save it with `aotexport_runtime.save(module, path)`, "
        "or its weights alone with `module.state_dict()`"
    )


# --- names that equal ours --------------------------------------------------------------------------------


class Colliding(nn.Module):
    """Uses names that `BundleModule` uses itself."""

    def __init__(self):
        super().__init__()
        self.bundle = nn.Linear(4, 3)
        self.program = nn.Linear(3, 2)
        self._plans = nn.ModuleList([nn.Linear(2, 2)])
        self.state_tensors = nn.ParameterDict({"load": nn.Parameter(torch.ones(2))})
        self.device = nn.Parameter(torch.ones(2))
        self.register_buffer("_constants", torch.ones(2))
        self.register_buffer("_environment", torch.ones(2), persistent=False)
        self._owners = torch.arange(2.0)

    def forward(self, x):
        shift = self._constants * self.device + self.state_tensors["load"] + self._owners + self._environment
        return self._plans[0](self.program(self.bundle(x))) + shift


def test_names_that_equal_ours_keep_working(new_bundle, batch):
    torch.manual_seed(0)
    original = Colliding()
    module = load(new_bundle(original, batch, programs=["infer"]))
    twin = copy.deepcopy(module.to("cpu")).eval()
    assert same(twin.state_dict(), original.state_dict())
    assert torch.equal(twin(batch), original.eval()(batch))
