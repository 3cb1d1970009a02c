"""Mistakes in model files, each with the whole text that the user reads."""

from pathlib import Path

import pytest

from tests.mistakes.told import LINEAR, NN, X, check

KINDS = "an nn.Module, a class or function without required arguments that returns one, or a function of tensors"
NO_FILE = "is no model file; write model.py, model.py:attr or package.module:attr"


def net(forward: str) -> str:
    """Return a model file whose `forward(self, x)` is this line, line 9 of the file."""
    return (
        f"{NN}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.linear = nn.Linear(4, 2)\n    def forward(self, x):\n        {forward}\n\nmodel = Net()\n{X}"
    )


NAMES = {
    "no_file": ("net.py", "no file `net.py`"),
    "weights": ("weights.pt", f"`weights.pt` {NO_FILE}"),
    "no_name_after_the_colon": ("model.py:", f"`model.py:` {NO_FILE}"),
    "other_name": (
        "model.py:net",
        "`model.py` has no `net`. Add the line\n\n    net = MyModule()\n\nor name what it has: model.py:model",
    ),
}
"""What is no name of a model: the name, and the whole message."""

REFUSED = {
    "syntax": (
        NN + "model = nn.Linear(4, 2\n",
        "running `model.py` failed at model.py:4: SyntaxError: '(' was never closed",
    ),
    "import": (
        "import torhc\n",
        "running `model.py` failed at model.py:1: ModuleNotFoundError: No module named 'torhc'",
    ),
    "state_dict": (
        NN + "model = nn.Linear(4, 2).state_dict()\n" + X,
        f"`model` in `model.py` is of type OrderedDict; it must be {KINDS}",
    ),
    "no_example": (
        NN + "model = nn.Linear(4, 2)\n",
        "`model.py` has no `example_inputs`. Add the arguments of one call, for example\n\n"
        '    example_inputs = {"input": torch.randn(2, 8)}\n\n'
        "as a dict of keyword arguments, a tuple of positional ones, or a function that returns either",
    ),
    "example_too_short": (
        NN + "model = nn.Bilinear(4, 4, 2)\n" + X,
        "the example inputs do not fit `Bilinear(input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor`: missing a "
        "required argument: 'input2'",
    ),
}
"""Model files that are refused before the model is called (exit code 2): the text, and the whole message."""

FAILING = {
    "factory_needs_arguments": (
        NN + "def model(width):\n    return nn.Linear(width, 2)\n" + X,
        "the model fails on the example inputs: {here}/model.py:5: in model: TypeError: empty(): argument 'size' failed "
        'to unpack the object at pos 2 with error "type must be tuple of ints,but got Tensor". `model` seems to make '
        "the model, and has required arguments: give it these (`functools.partial`), or export what it returns",
    ),
    "factory_takes_what_it_is_given": (
        NN + "def model(x):\n    return nn.Linear(4, 2)\n" + X,
        "output `output` is a `torch.nn.modules.linear.Linear`, which a bundle cannot hold. Return tensors. Of a function "
        "that makes a module, export what it returns",
    ),
    "example_of_another_shape": (
        net("return self.linear(x.view(7))"),
        "the model fails on the example inputs in train mode: {here}/model.py:9: in forward: RuntimeError: shape '[7]' is "
        "invalid for input of size 12",
    ),
    "example_on_meta": (
        NN + "model = nn.Linear(4, 2)\nexample_inputs = (torch.ones(3, 4, device='meta'),)\n",
        "`input` is on the meta device, and has no values. Make it on a real one",
    ),
    "example_holds_a_function": (
        NN + "def model(x, f):\n    return f(x)\n\nexample_inputs = (torch.ones(3), torch.sin)\n",
        "input `f` is a `builtins.builtin_function_or_method`, which a bundle cannot hold. Pass tensors, numbers, strings, "
        "None, or tuples, lists, dicts, named tuples or dataclasses of them",
    ),
    "writes_to_a_parameter": (
        net("return self.linear.weight.add_(1).sum() + x"),
        "the model fails on the example inputs in train mode: {here}/model.py:9: in forward: RuntimeError: a leaf Variable "
        "that requires grad is being used in an in-place operation. It runs without gradients in eval mode: export that "
        "alone (`--program infer`)",
    ),
    "not_initialised": (
        NN + "model = nn.LazyLinear(2)\n" + X,
        "`weight` is not initialised yet; call the module once before exporting it",
    ),
    "torchscript": (
        NN + "import warnings\nwarnings.simplefilter('ignore')\nmodel = torch.jit.script(nn.Linear(4, 2))\n" + X,
        "the model is TorchScript, whose code a trace does not see; export the Python module that it was made from",
    ),
}
"""Model files whose model cannot be exported (exit code 1)."""

ROWS = [
    *(pytest.param(LINEAR, name, 2, text, id=row) for row, (name, text) in NAMES.items()),
    *(pytest.param(source, "model.py", 2, text, id=row) for row, (source, text) in REFUSED.items()),
    *(pytest.param(source, "model.py", 1, text, id=row) for row, (source, text) in FAILING.items()),
]


@pytest.mark.parametrize(("source", "name", "code", "text"), ROWS)
def test_mistake_in_a_model_file_is_told_in_whole(
    source: str, name: str, code: int, text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "model.py").write_text(source)
    check(f"{name} -o new", code, text, here, capfd)
