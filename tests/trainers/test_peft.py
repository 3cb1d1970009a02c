"""Adapters of peft on a loaded bundle: the same losses and adapters as on the original."""

from collections import OrderedDict

import peft
import pytest
import torch
from torch import nn

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
def bundle(new_bundle):
    batch = torch.export.Dim("batch", min=1, max=64)
    return new_bundle(make(), torch.randn(4, 5, 8), dynamic_shapes=({0: batch},))


CONFIGS = {
    "LoRA": {"target_modules": ["query", "value", "line"], "lora_dropout": 0.1},
    "DoRA": {"target_modules": ["query"], "use_dora": True},
    "a head beside": {"target_modules": "all-linear", "modules_to_save": ["head"], "exclude_modules": ["head"]},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_adapters_train_on_a_loaded_bundle_as_on_the_original(bundle, config):
    assert_same_adapters(make(), bundle, peft.LoraConfig(r=2, **config), {"input": torch.randn(6, 5, 8)})


def assert_same_adapters(model, bundle, config, given):
    """Train adapters of a model and of its bundle; return the latter's."""
    losses, adapters = [], []
    for network in (model, aotexport_runtime.load(bundle, matmul="torch").train()):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(network, config)
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            result = adapted(**given)
            loss = result.square().mean() if isinstance(result, torch.Tensor) else result.loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        adapters.append(peft.get_peft_model_state_dict(adapted))
    assert losses[0] == losses[1]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    return adapted
