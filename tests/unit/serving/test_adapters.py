"""Adapters of a servable: each call applies the one that it asks for, and joined calls are of one."""

import shutil

import numpy as np
import pytest
import torch

import aotexport_runtime
from aotexport_runtime import adapters
from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.server.bundles import adapters_beside, find_models
from aotexport_runtime.serving.servable import Servable

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)


@pytest.fixture(scope="module")
def saved(exported, tmp_path_factory):
    """Give directories of two adapters by name, and what the bundle answers with each and without."""
    directory, answers = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("german", "french")):
        module = aotexport_runtime.load(exported("digits")).eval()
        answers[None] = module(torch.from_numpy(X)).detach().numpy()
        torch.manual_seed(seed)
        adapters.add_lora(module, r=2, alpha=16)
        for parameter in module.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
        adapters.save_adapter(module, directory / name)
        answers[name] = module(torch.from_numpy(X)).detach().numpy()
    return {name: directory / name for name in answers if name}, answers


@pytest.fixture
def servable(exported, saved):
    servable = Servable(exported("digits"), adapters=saved[0])
    servable.warm_up()
    yield servable
    servable.close()


def test_each_call_applies_the_adapter_that_it_asks_for(servable, saved):
    for name, expected in saved[1].items():
        np.testing.assert_allclose(servable.infer({"input": X}, adapter=name)["output"], expected, rtol=1e-5, atol=1e-6)
    assert len({expected.tobytes() for expected in saved[1].values()}) == 3


def test_joined_calls_are_of_one_adapter(servable, saved):
    assert servable.batch_axes is not None
    names = [None, "german", "french", "german", None, "french"] * 4
    answers = [servable.submit({"input": X}, adapter=name) for name in names]
    for name, answer in zip(names, answers, strict=True):
        np.testing.assert_allclose(answer.result()["output"], saved[1][name], rtol=1e-5, atol=1e-6)
    assert any(answer.batch_size > 2 for answer in answers)


def test_unknown_adapter_is_refused_by_name(servable):
    with pytest.raises(CallInvalid) as refused:
        servable.submit({"input": X}, adapter="dutch")
    assert refused.value.violations == ["there is no adapter `dutch`; there are `german`, `french`"]


def test_adapters_beside_a_version_are_found_and_change_what_is_served(exported, saved, tmp_path):
    version = tmp_path / "repository" / "digits" / "1"
    shutil.copytree(exported("digits"), version)
    before = find_models(tmp_path / "repository")["digits"]
    for name, path in saved[0].items():
        shutil.copytree(path, version.with_name("1.adapters") / name)
    after = find_models(tmp_path / "repository")["digits"]
    assert [candidate.version for candidate in after] == ["1"]
    assert before[0].files != after[0].files
    assert [*adapters_beside(version)] == ["french", "german"]
