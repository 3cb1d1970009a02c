"""Model files: what they may offer, and the errors that show the lines to write."""

import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aotexport.errors import ModelFileInvalid
from aotexport.model.cast import cast
from aotexport.model.programs import choose_programs
from aotexport.model.source import load_source
from tests.refusals import refusal

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.linear = nn.Linear(3, width)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale
"""
INPUTS = "example_inputs = (torch.ones(4, 3),)\n"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files to a fresh working directory; modules that they become are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)

    def write_files(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    yield write_files
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("line", "is_module"),
    [
        ("model = Net()", True),
        ("model = Net", True),
        ("model = lambda: Net()", True),
        ("def model(width=2): return Net(width)", True),
        ("import functools; model = functools.partial(Net, 2)", True),
        ("def model(x): return x[:, :2]", False),
        ("def model(*tensors): return torch.zeros(3) + sum(tensors)", False),
        ("def model(x=torch.zeros(4, 3)): return x[:, :2]", False),
        ("model = torch.Tensor.flatten", False),
    ],
)
def test_model_file_offers_a_module_or_a_function_of_tensors(write: Write, line: str, is_module: bool) -> None:
    write(model=NET + INPUTS + line)
    target: Any = load_source("model.py").target
    assert isinstance(target, nn.Module) is is_module
    assert target(torch.ones(4, 3)).shape in ((4, 2), (4, 3), (12,))


@pytest.mark.parametrize("where", ["model.py:other", "model.py:holder.inner", "package.model:other"])
def test_attribute_named_after_the_file_is_taken(write: Write, where: str) -> None:
    text = NET + INPUTS + "other = Net(7)\nclass holder: inner = other\n"
    write(model=text, package__model=text)
    target: Any = load_source(where).target
    assert target.linear.out_features == 7


def test_model_file_importing_a_sibling_finds_it_from_another_directory(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(nets__model="from layers import Net, torch\nmodel = Net()\n" + INPUTS, nets__layers=NET)
    source = load_source("nets/model.py")
    assert isinstance(source.target, nn.Module)
    assert source.root == tmp_path / "nets"
    assert str(source.root) not in sys.path


@pytest.mark.parametrize(
    ("lines", "args", "kwargs"),
    [
        ("example_inputs = (1, 2)", (1, 2), {}),
        ("example_inputs = ()", (), {}),
        ("example_inputs = {'x': 1, 'scale': 2}", (), {"x": 1, "scale": 2}),
        ("def example_inputs(): return (1,)", (1,), {}),
        ("example_inputs = lambda: {'x': 1}", (), {"x": 1}),
        ("example_inputs = (1,); example_kwargs = {'scale': 2}", (1,), {"scale": 2}),
        ("example_inputs = {'x': 1}; example_kwargs = {'scale': 2}", (), {"x": 1, "scale": 2}),
        ("example_kwargs = {'x': 1}", (), {"x": 1}),
    ],
)
def test_example_inputs_in_any_form_give_the_arguments(
    write: Write, lines: str, args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    write(model=NET + "model = Net()\n" + lines)
    source = load_source("model.py")
    assert (source.example.args, source.example.kwargs) == (args, kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f'{NET}if __name__ == "__main__":\n    model = Net()',
            '`model.py` has no `model` outside of the block under `if __name__ == "__main__":`, which an export does '
            "not run. Add the line\n\n    model = Net()\n\nor name what it has: model.py:Net",
        ),
        (
            "def model(x): return x\ndef example_inputs():\n    return 1 / 0",
            "calling `example_inputs()` of `model.py` failed at model.py:3: ZeroDivisionError: division by zero",
        ),
        (
            "def model(x): return x\nexample_inputs = {'x': 1}\nexample_kwargs = {'x': 1}",
            "`model.py`: `x` is in example_inputs and in example_kwargs",
        ),
        (
            "def model(x): return x\nexample_inputs = (1,)\ndynamic_shapes = 'batch'",
            "`dynamic_shapes` in `model.py` is of type str; it must be a dict nested like the arguments. "
            "For example\n\n"
            '    dynamic_shapes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}',
        ),
        (
            "def model(x): return x\nexample_inputs = (1,)\ncustom_ops = ['no_such_ops']",
            "importing `no_such_ops`, which `custom_ops` of `model.py` names, failed: ModuleNotFoundError: "
            "No module named 'no_such_ops'",
        ),
    ],
)
def test_model_file_offering_something_wrong_is_refused(write: Write, text: str, message: str) -> None:
    write(model=text)
    assert refusal(ModelFileInvalid, load_source, "model.py") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sibling", "sibling.py:2: ValueError: the\nwhole message"),
        (
            "import argparse\n\nargparse.ArgumentParser().parse_args(['--hidden'])",
            "model.py:3: SystemExit: 2. A model file must run to its end, and has no command line of its own: parse "
            'options (argparse) in a block under `if __name__ == "__main__":`, which an export does not run',
        ),
    ],
)
def test_model_file_that_raises_is_refused_with_the_users_line(write: Write, text: str, message: str) -> None:
    write(model=text, sibling="\nraise ValueError('the\\nwhole message')")
    assert refusal(ModelFileInvalid, load_source, "model.py") == f"running `model.py` failed at {message}"


def test_cast_changes_floating_tensors_alone_and_keeps_ties(write: Write) -> None:
    lines = "model.tied = model.linear.weight\nmodel.register_buffer('count', torch.tensor(3))\n"
    inputs = (
        "x = torch.ones(4, 3, requires_grad=True)\nexample_inputs = (x, {'same': x, 'ids': torch.tensor([1])}, 2)\n"
    )
    write(model=NET + "model = Net()\n" + lines + inputs)
    source = cast(load_source("model.py"), torch.bfloat16)
    module: Any = source.target
    assert {name: tensor.dtype for name, tensor in module.state_dict().items()} == {
        "linear.weight": torch.bfloat16,
        "tied": torch.bfloat16,
        "linear.bias": torch.bfloat16,
        "count": torch.int64,
    }
    assert module.tied is module.linear.weight
    x, nested, number = source.example.args
    assert (x.dtype, x.requires_grad, x.is_leaf) == (torch.bfloat16, True, True)
    assert nested["same"] is x
    assert (nested["ids"].dtype, number) == (torch.int64, 2)


def test_cast_changes_tensors_in_attributes_of_arguments_and_leaves_the_callers_objects(write: Write) -> None:
    inputs = """
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    ids: torch.Tensor
    rest: object

x = torch.ones(4, 3)
batch = Batch(x, torch.tensor([1]), SimpleNamespace(parts=[x], nothing=SimpleNamespace(size=3)))
example_inputs = (batch, {"again": batch, "x": x})
"""
    write(model=NET + "model = Net()\n" + inputs)
    given = load_source("model.py")
    before = given.example.args[0]
    batch, others = cast(given, torch.bfloat16).example.args
    assert (type(batch), batch.x.dtype, batch.ids.dtype) == (type(before), torch.bfloat16, torch.int64)
    assert others["again"] is batch
    assert batch.x is others["x"] is batch.rest.parts[0]
    assert batch.rest.nothing.size == 3
    assert before.x.dtype is before.rest.parts[0].dtype is torch.float32


class Dropping(nn.Module):
    """Takes a dict of tensors, and drops some values in train mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch, scale):
        return nn.functional.dropout(self.linear(batch["x"]), 0.5, self.training) * scale + batch["y"]


def saved(path, model, example_inputs=True):
    rows = torch.export.Dim("rows", min=2, max=64)
    x = torch.randn(4, 3)
    shapes = ({"x": {0: rows}, "y": {0: rows}}, None)
    program = torch.export.export(model, ({"x": x, "y": x}, 2.0), dynamic_shapes=shapes)
    if not example_inputs:
        program.example_inputs = None
    torch.export.save(program, path)
    return path


@pytest.mark.parametrize(("training", "programs"), [(True, ["train"]), (False, ["infer", "eval-joint"])])
def test_pt2_file_is_a_source_of_one_mode_with_its_example_and_sizes(tmp_path, training, programs):
    source = load_source(str(saved(tmp_path / "m.pt2", Dropping().train(training))))

    sizes = source.example.dynamic_shapes["batch"]
    assert sizes["x"][0] is sizes["y"][0]
    assert (sizes["x"][0].min, sizes["x"][0].max, source.example.dynamic_shapes["scale"]) == (2, 64, None)
    assert [spec.name for spec in choose_programs(source.target, source.example)] == programs
    assert list(source.target.state_dict()) == ["linear.weight", "linear.bias"]
    other = "infer" if training else "train"
    with pytest.raises(ModelFileInvalid) as caught:
        choose_programs(source.target, source.example, other)
    made, asked = ("train", "eval") if training else ("eval", "train")
    assert str(caught.value) == (
        f"program `{other}` is of {asked} mode, and `torch.export` made the model in {made} mode, its only one. Export "
        f"the original model, or {'`train`' if training else '`infer` and `eval-joint`'}"
    )


class Touching:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_of_a_pt2_file_run_no_code(tmp_path):
    path, hostile = saved(tmp_path / "m.pt2", Dropping()), io.BytesIO()
    torch.save(((Touching(tmp_path / "ran"),), {}), hostile)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "h.pt2", "w") as crafted:
        for name in archive.namelist():
            crafted.writestr(name, hostile.getvalue() if "sample_inputs" in name else archive.read(name))
    with pytest.raises(ModelFileInvalid, match=r"reading `.*h.pt2` by `torch.export.load` failed"):
        load_source(str(tmp_path / "h.pt2"))
    assert not (tmp_path / "ran").exists()
