"""Weights of a checkpoint: the bundle is that of the model that holds them; what does not fit is told."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file, save_model

from aotexport.cli import app
from aotexport.errors import ModelFileInvalid
from aotexport.model.checkpoint import give_weights
from aotexport.model.source import load_source

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.inner(x))) * self.scale

def model():
    torch.manual_seed(0)
    return Net()

example_inputs = (torch.ones(2, 4),)
"""


@pytest.fixture
def where(tmp_path, monkeypatch):
    """Return a model file, beside a checkpoint of its model; they lie in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "weights").mkdir()
    save_model(load_source("model.py").target, "weights/model.safetensors")
    return tmp_path


def test_bundle_of_a_checkpoint_is_that_of_the_model_that_holds_it(where):
    for arguments in (["-o", "own"], ["-o", "given", "--weights", "weights"]):
        done = CliRunner().invoke(app, ["model.py", *arguments, "--no-verify"])
        assert done.exit_code == 0, done.output
    files = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (where / "own", where / "given")
    ]
    assert files[0] == files[1]


def test_model_of_a_checkpoint_keeps_ties_frozen_weights_and_buffers(where):
    model = load_source("model.py", where / "weights").target
    assert model.head.weight is model.inner.weight
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["inner.bias"]
    assert model.scale.tolist() == [3.0] * 4
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("norm.running_var"), "has no `norm.running_var`; it has norm.running_mean, "),
        (lambda given: given.update({"norm.bias": torch.ones(3)}), "of shape [3] in `w`, and of [4] in the model"),
        (lambda given: given.update({"norm.bias": torch.ones(4).half()}), "and of torch.float32 in the model"),
    ],
)
def test_tensor_that_does_not_fit_is_told(where, change, message):
    given = {name: tensor.clone() for name, tensor in load_source("model.py").target.state_dict().items()}
    change(given)
    (where / "w").mkdir()
    save_file(given, "w/model.safetensors")
    with pytest.raises(ModelFileInvalid) as caught:
        give_weights(load_source("model.py").target, (where / "w").relative_to(where))
    assert message in str(caught.value)
