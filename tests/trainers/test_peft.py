"""Adapters of peft on a loaded bundle: the same losses and adapters as on the original."""

from collections import OrderedDict

import peft
import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from tests.models import module


def make():
    torch.manual_seed(0)
    attention = module(
        lambda self, x: self.query(x).softmax(dim=-1) @ self.value(x).mT, query=nn.Linear(8, 8), value=nn.Linear(8, 8)
    )
    line = nn.Conv1d(5, 5, 3, padding=1)
    return nn.Sequential(OrderedDict(line=line, attention=attention, dropout=nn.Dropout(0.2), head=nn.Linear(5, 3)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("peft") / "bundle"
    batch = torch.export.Dim("batch", min=1, max=64)
    aotexport.export(make(), (torch.randn(4, 5, 8),), output=path, dynamic_shapes=({0: batch},), verify=False)
    return path


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["query", "value", "line"], "lora_dropout": 0.1},
        {"target_modules": ["query"], "use_dora": True},
        {"target_modules": "all-linear", "modules_to_save": ["head"], "exclude_modules": ["head"]},
    ],
    ids=["LoRA", "DoRA", "a head beside"],
)
def test_adapters_train_on_a_loaded_bundle_as_on_the_original(bundle, config):
    x, losses, adapters = torch.randn(6, 5, 8), [], []
    for network in (make(), aotexport_runtime.load(bundle, matmul="torch").train()):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(network, peft.LoraConfig(r=2, **config))
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            loss = adapted(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        adapters.append(peft.get_peft_model_state_dict(adapted))
    assert losses[0] == losses[1]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
