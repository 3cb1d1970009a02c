"""A bug in any stage fails the export as one, and leaves nothing behind: no graph, library or note goes missing."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport
from aotexport import InternalError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, labels=None) -> Any:
        y = self.linear(x).tanh()
        return y if labels is None else (y, (y - labels).square().mean())


class Asking(Net):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else super().forward(x).detach()


class Preparing(Net):
    def __init__(self):
        super().__init__()
        self.prepared = False

    def forward(self, x):
        if not self.prepared:
            self.prepared = True
        return super().forward(x)


class Hooked(Net):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Custom(Net):
    def forward(self, x):
        return Doubling.apply(super().forward(x))


def by_key(tensors):
    return tensors["a"] - tensors["b"]


def branching(x):
    return x * 2 if x.sum().item() > 0 else x


X = torch.ones(2, 4)
STAGES = {
    "forward graph": ("capture.trace.flat_call:tree_of", Net(), (X,), {}),
    "larger sizes": ("capture.forward:holds_for", Net(), (X[:1],), {"dynamic_shapes": ({0: Dim("n")},)}),
    "second trace": ("capture.trace.experiments:_same", Asking(), (X,), {"programs": "infer"}),
    "key order": ("capture.trace.key_order:argument_tables", by_key, ({"a": X, "b": X + 1},), {}),
    "value in the example": ("capture.trace.example_values:number_at", branching, (X,), {}),
    "custom function": ("capture.effects.autograd_functions:lift_tensors", Custom(), (X,), {"programs": "train"}),
    "hook": ("capture.effects.hooks:traced_backward", Hooked(), (X,), {"programs": "train"}),
    "functional graph": ("capture.functional.capture:_put_in_form", Net(), (X,), {}),
    "encode the functional graph": ("encode.functional:saved_values", Net(), (X,), {"programs": "train"}),
    "lower for CPUs": ("lower.cpu.partition:compile_library", Net(), (X,), {"programs": "infer", "targets": "cpu"}),
    "first call": ("capture.programs.forward_graphs:flattened", Preparing(), (X,), {}),
    "label-free call": ("eager.label_free:flattened", Net(), (X, torch.ones(2, 3)), {"programs": "infer"}),
    "versions": ("vectors.versions:_counted", Net(), (X,), {}),
    "small sizes": (
        "vectors.small_sizes:is_dimension",
        Net(),
        (X,),
        {"dynamic_shapes": ({0: Dim.DYNAMIC},), "verify": True},
    ),
    "ONNX translation": ("lower.onnx.translate:_name_sizes", Net(), (X,), {"programs": "infer", "onnx": True}),
}
"""What is wrong in the stage, and an export that gets there."""

BUGS = {NameError: "misspelt", AttributeError: "None.misspelt"}


@pytest.mark.parametrize(("name", "kind"), [*zip(STAGES, itertools.cycle(BUGS))])
def test_bug_in_a_stage_fails_the_export_and_leaves_nothing(name, kind, tmp_path, monkeypatch):
    place, model, args, options = STAGES[name]
    module, _, function = place.partition(":")
    wrong = importlib.import_module(f"aotexport.{module}")
    namespace = {}
    text = f"def wrong(*args, **kwargs):\n    return {BUGS[kind]}"
    exec(compile(text, str(wrong.__file__), "exec"), namespace)
    monkeypatch.setattr(wrong, function, namespace["wrong"])
    with pytest.raises(InternalError, match="Please report it") as raised:
        aotexport.export(model, args, output=tmp_path / "bundle", **{"verify": False, **options})
    assert isinstance(raised.value.__cause__, kind)
    assert list(Path(tmp_path).iterdir()) == []
