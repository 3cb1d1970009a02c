"""Adapters of a stranger: settings, tensors and files that are refused, and leave the module as it was."""

import json
import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, NotSupported, adapters
from aotexport_runtime.adapters import files
from aotexport_runtime.adapters.config import LoraConfig
from tests import models

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
A, B = "base_model.model.inner.lora_A.weight", "base_model.model.inner.lora_B.weight"


@pytest.fixture(scope="module")
def bundle(new_bundle):
    return new_bundle(models.module(lambda self, x: self.inner(x), inner=nn.Linear(4, 6)), torch.ones(2, 4))


@pytest.fixture
def module(bundle):
    return aotexport_runtime.load(bundle, matmul="torch")


@pytest.fixture(scope="module")
def written(bundle, tmp_path_factory):
    module = aotexport_runtime.load(bundle, matmul="torch")
    adapters.add_lora(module, ["inner"], r=2)
    return adapters.save_adapter(module, tmp_path_factory.mktemp("written") / "adapter")


@pytest.fixture
def adapter(written, tmp_path):
    return shutil.copytree(written, tmp_path / "adapter")


def refused(module, adapter):
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    with pytest.raises((ArgumentInvalid, NotSupported)) as caught:
        adapters.load_adapter(module, adapter)
    assert {name: parameter.requires_grad for name, parameter in module.named_parameters()} == before
    return str(caught.value)


PATTERNS = ["(a+)+$", "(.*)*b", "a{1,9}", "inner|outer", ".+", "[", "\\w", "*", "a**", "", "a$"]
SETTINGS = {
    **{f"expression {each}": ({"alpha_pattern": {each: 3}}, "") for each in PATTERNS},
    "r as text": ({"r": "8"}, "Expected `int`, got `str` - at `$.r`"),
    "no rank": ({"r": 0}, "Expected `int` >= 1 - at `$.r`"),
    "alpha of 400 digits": ({"lora_alpha": 10**400}, None),
    "all is dropped": ({"lora_dropout": 1.0}, "Expected `float` < 1.0 - at `$.lora_dropout`"),
    "many modules": ({"modules_to_save": ["a"] * 257}, "Expected `array` of length <= 256 - at `$.modules_to_save`"),
    "alpha of a layer too large": (
        {"alpha_pattern": {"inner": 1e31}},
        "Expected `float` <= 1e+30 - at `$.alpha_pattern[...]`",
    ),
    "many alphas": ({"alpha_pattern": {f"a{index}": 1 for index in range(1025)}}, None),
    "unknown": ({"use_more": {"a": 1}}, "`use_more` is {'a': 1}, which loaded bundles do not compute"),
    "base is changed": ({"init_lora_weights": "pissa"}, "`init_lora_weights` is pissa, which loaded bundles do not"),
    "no object": ([1], "expected `peft_type` LORA, got list"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_none_are_refused(module, adapter, settings, message):
    path = adapter / CONFIG
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **settings} if isinstance(settings, dict) else settings)
    )
    assert refused(module, adapter).startswith("" if message is None else f"{path}: {message}")


TEXTS = {
    "no JSON": ("{", "adapter_config.json: Input data was truncated"),
    "twice": ('{"peft_type": "LORA", "r": 1, "r": 2}', "adapter_config.json: an object has the same key twice"),
    "deep": (
        '{"peft_type": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "adapter_config.json: nested deeper than 64 levels",
    ),
    "large": (" " * (1 << 24) + "{}", "adapter_config.json: 16777217 bytes of JSON; at most 16777216 are read"),
}


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_settings_that_are_not_json_within_limits_are_refused(module, adapter, text, message):
    (adapter / CONFIG).write_text(text)
    assert refused(module, adapter) == f"`path`: no adapter can be read from {str(adapter)!r}: {message}"


SUBSET = r"inner ^layers.0.inner layers\.\d\.inner layers.[0-3].inner layers..*.inner .*ner ^0.inner l.*s . ..0.inner"


@pytest.mark.parametrize("pattern", SUBSET.split())
@pytest.mark.parametrize("path", ["inner", "layers.0.inner", "layers.10.inner", "layers_0_inner"])
def test_alpha_of_a_pattern_is_that_of_the_layers_that_peft_means(pattern, path):
    from peft.utils.other import get_pattern_key

    expected = 3 if get_pattern_key([pattern], path) == pattern != path or pattern == path else 8
    assert LoraConfig(alpha=8, alphas={pattern: 3}).scaling(path, 1) == expected


def test_pattern_takes_time_by_its_length():
    pattern = ".*a" * 300
    assert LoraConfig(alpha=8, alphas={pattern: 3}).scaling("a" * 4000 + "b", 1) == 8


TENSORS = {
    "complex": (B, torch.zeros(6, 2, dtype=torch.complex64), "is torch.complex64, and the module needs floats"),
    "no rank": (A, torch.zeros(0, 4), "is [0, 4], and the module needs [1, 4]"),
    "rank without data": (A, torch.zeros(10**12, 0), "is [1000000000000, 0], and the module needs [1000000000000, 4]"),
    "other rank": (B, torch.zeros(6, 3), "is [6, 3], and the module needs [6, 2]"),
}


@pytest.mark.parametrize(("key", "tensor", "message"), TENSORS.values(), ids=TENSORS)
def test_factors_that_do_not_fit_are_refused_before_parameters_are_made(module, adapter, key, tensor, message):
    save_file({**load_file(adapter / WEIGHTS), key: tensor}, adapter / WEIGHTS, metadata={"format": "pt"})
    name = key.removeprefix("base_model.model.")
    others = ". Load the bundle of the model that it was trained on"
    assert refused(module, adapter) == f"{adapter}: `{name}` {message}{others}"


def test_key_that_a_file_of_tensors_has_twice_is_refused(module, adapter):
    data = (adapter / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    again = f"{json.dumps(header)[:-1]}, {json.dumps(B)}: {json.dumps(header[B])}}}".encode()
    (adapter / WEIGHTS).write_bytes(len(again).to_bytes(8, "little") + again + data[8 + size :])
    assert refused(module, adapter).startswith(f"`path`: no adapter can be read from {str(adapter)!r}: {WEIGHTS}: ")


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("what", ["pipe", "device", "hole", "missing"])
def test_file_that_is_none_is_refused_and_stops_nobody(module, adapter, name, what):
    path = adapter / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "hole":
        path.touch()
        os.truncate(path, 10**12)
    assert refused(module, adapter).startswith(f"`path`: no adapter can be read from {str(adapter)!r}: ")


def test_file_of_as_many_bytes_and_holes_as_may_be_is_read(adapter, monkeypatch):
    monkeypatch.setattr(files, "hole_nbytes", lambda stream: files.MAX_HOLE_NBYTES)
    assert files._read(adapter, (adapter / WEIGHTS).stat().st_size)[1].keys() == {A, B}


def test_adapter_is_replaced_in_one_step_and_other_files_stay(module, adapter):
    (adapter / "README.md").write_text("about")
    (adapter / "more").mkdir()
    (adapter / "more/file").write_text("more")
    stop, ranks = threading.Event(), set()

    def read():
        while not stop.is_set():
            other = aotexport_runtime.load(module.bundle.root, matmul="torch")
            adapters.load_adapter(other, adapter)
            ranks.add(next(p.shape[0] for name, p in other.named_parameters() if name.endswith(".A")))

    adapters.add_lora(module, ["inner"], r=3)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            adapters.save_adapter(module, adapter, force=True)
    finally:
        stop.set()
        reader.join()
    assert ranks <= {2, 3}
    assert {path.name for path in adapter.iterdir()} == {WEIGHTS, CONFIG, "README.md", "more"}
    assert (adapter / "more/file").read_text() == "more"
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]
