"""Adapters of the runtime on a loaded bundle, next to peft's on the original: training, files, merging."""

import copy
import functools
import json

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, NotSupported, adapters
from tests.models import seeded
from tests.refusals import refusal

TARGETS = ["words", "inner", "turned", "image"]


class Net(nn.Module):
    """A weight of each kind that adapters know, one that is scaled before it is used, and a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 6)
        self.turned = Conv1D(6, 6)
        self.image = nn.Conv2d(1, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(6, 2)
        self.mix = nn.Parameter(torch.randn(2, 2))
        self.unread = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        y = self.turned(self.dropout(self.inner(self.words(x))).relu())
        return self.head(self.image(y.unsqueeze(1)).mean(1)) @ (2 * self.mix)


X = torch.arange(20).view(4, 5) % 10


@pytest.fixture(scope="module")
def bundle(new_bundle):
    return new_bundle(seeded(Net), X)


@pytest.fixture
def module(bundle):
    return aotexport_runtime.load(bundle, matmul="torch").train()


def with_peft(**options):
    options = {"exclude_modules": options.pop("exclude", None), "lora_dropout": options.pop("dropout", 0.0), **options}
    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=TARGETS, fan_in_fan_out=True, **options)
    model = seeded(Net)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).train()


def with_ours(module, **options):
    torch.manual_seed(1)
    adapters.add_lora(module, TARGETS, r=2, alpha=16, **options)
    return module


def trained(module, steps=20):
    """Return the losses of steps of training."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.01), []
    torch.manual_seed(2)
    for _ in range(steps):
        loss = module(X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert all(p.grad is not None for p in parameters)
    return torch.stack(losses)


def result(module):
    with torch.no_grad():
        return module.eval()(X)


OPTIONS = {
    "LoRA": {},
    "dropout": {"dropout": 0.2},
    "DoRA": {"use_dora": True, "dropout": 0.1},
    "all biases and a head": {"bias": "all", "modules_to_save": ["head"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_adapter_trains_as_pefts_and_is_read_by_peft_and_back(module, bundle, tmp_path, options):
    theirs, ours = with_peft(**options), with_ours(module, **options)
    torch.testing.assert_close(trained(ours), trained(theirs), rtol=0, atol=1e-6)
    expected = result(theirs)
    torch.testing.assert_close(result(ours), expected, rtol=0, atol=1e-5)
    adapters.save_adapter(ours, tmp_path / "ours")
    read = peft.PeftModel.from_pretrained(seeded(Net), tmp_path / "ours")
    torch.testing.assert_close(result(read), result(ours), rtol=0, atol=1e-6)
    theirs.save_pretrained(tmp_path / "theirs")
    a, b = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    assert {n for n in a if a[n] != b[n]} <= {"base_model_name_or_path", "fan_in_fan_out", "target_modules"}
    assert not int.from_bytes((tmp_path / "ours/adapter_model.safetensors").read_bytes()[:8], "little") % 8
    other = aotexport_runtime.load(bundle)
    adapters.load_adapter(other, tmp_path / "theirs")
    torch.testing.assert_close(result(other), expected, rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in other.parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_merged_weights_give_the_adapters_results_and_are_saved(module, tmp_path, options):
    with_ours(module, **options)
    trained(module, 3)
    before, base = result(module), result(seeded(Net))
    assert "`words.weight` has an adapter" in str(module.explain())
    with adapters.disable_adapters(module):
        torch.testing.assert_close(result(module), base)
    adapters.merge_adapter(module)
    torch.testing.assert_close(result(module), before)
    assert "has an adapter" not in str(module.explain())
    saved = aotexport_runtime.load(aotexport_runtime.save(module, tmp_path / "tuned"))
    torch.testing.assert_close(result(saved), before)
    adapters.unmerge_adapter(module)
    torch.testing.assert_close(result(module), before)
    adapters.delete_adapter(module, "default")
    torch.testing.assert_close(result(module), base)


def test_report_says_the_form_of_each_adapter_and_why(module):
    report = adapters.add_lora(module, [*TARGETS, "mix"], r=2, modules_to_save=["head"])
    assert str(report).splitlines() == [
        "mix            weight  program `train` reads it by `aten::mul.Tensor`",
        "words.weight   graph   read by `aten::embedding.default` alone",
        "inner.weight   graph   read by `aten::linear.default` alone",
        "turned.weight  graph   read by `aten::addmm.default` alone",
        "image.weight   graph   read by `aten::conv2d.default` alone",
        "head.weight    whole",
        "head.bias      whole",
        "136 of 379 elements are trained",
    ]
    trained(module, 2)


def test_several_adapters_are_switched_added_up_and_deleted(module):
    adapters.add_lora(module, ["inner"], r=2, name="one")
    trained(module, 2)
    one = result(module)
    adapters.add_lora(module, ["turned"], r=3, name="two")
    trained(module.train(), 2)
    two = result(module)
    adapters.set_adapter(module, "one")
    assert torch.equal(result(module), one)
    assert [n for n, p in module.named_parameters() if p.requires_grad] == ["inner.lora.one.A", "inner.lora.one.B"]
    adapters.set_adapter(module, ["one", "two"])
    assert not torch.equal(result(module), one)
    with adapters.use_adapter(module, "two"):
        assert torch.equal(result(module), two)
    adapters.delete_adapter(module, "one")
    assert torch.equal(result(module), two)


def test_adapter_that_comes_in_eval_mode_drops_nothing(module, bundle, tmp_path):
    with_ours(module, dropout=0.5)
    trained(module, 3)
    adapters.save_adapter(module, tmp_path / "adapter")
    loaded = aotexport_runtime.load(bundle).eval()
    adapters.load_adapter(loaded, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), result(module), rtol=0, atol=0)


def test_copy_has_adapters_of_its_own(module):
    with_ours(module)
    trained(module, 2)
    twin, before = copy.deepcopy(module), result(module)
    trained(twin.train(), 2)
    assert torch.equal(result(module), before)
    assert not torch.equal(result(twin), before)


# --- what is refused --------------------------------------------------------------------------------------


refused = functools.partial(refusal, (ArgumentInvalid, NotSupported))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "`r`: expected an integer of at least 1, got 0"),
        ({"name": "a.b"}, "`name`: 'a.b' cannot be the name of an adapter; use letters, digits and `_`"),
        ({"modules_to_save": ["haed"]}, "`modules_to_save`: the module has no `haed`; at its top are "),
        ({"targets": ["iner"]}, "`targets`: 'iner' means no weight of the module. Layers that it has: `inner`"),
        ({"targets": ["unread"]}, "`targets`: no program reads a weight that 'unread' means"),
        (
            {"targets": ["mix"], "dropout": 0.1},
            "`mix`: an adapter of the weight itself has no input to drop: program `train` reads it by "
            "`aten::mul.Tensor`",
        ),
    ],
)
def test_adapter_that_cannot_be_is_refused_by_name(module, options, message):
    before = dict(module.named_parameters())
    assert refused(adapters.add_lora, module, **options).startswith(message)
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(p.requires_grad for p in module.parameters())


def test_adapter_of_another_base_or_shape_is_refused_and_leaves_nothing(module, bundle, tmp_path):
    with_ours(module)
    adapters.save_adapter(module, tmp_path / "adapter")
    tuned = aotexport_runtime.load(bundle)
    with torch.no_grad():
        tuned.head.bias += 1
    tuned = aotexport_runtime.load(aotexport_runtime.save(tuned, tmp_path / "tuned"))
    assert refused(adapters.load_adapter, tuned, tmp_path / "adapter") == (
        f"{tmp_path / 'adapter'}: the adapter was trained over other weights than 'Net' has now: `head.bias` differs. "
        "Load the bundle that it was trained over, or take it all the same (`any_base=True`)"
    )
    adapters.load_adapter(tuned, tmp_path / "adapter", any_base=True)
    _with_tensor(tmp_path / "adapter", "base_model.model.inner.lora_B.weight", torch.zeros(7, 2))
    other = aotexport_runtime.load(bundle)
    assert refused(adapters.load_adapter, other, tmp_path / "adapter", any_base=True) == (
        f"{tmp_path / 'adapter'}: `inner.lora_B.weight` is [7, 2], and the module needs [6, 2]. Load the bundle of the "
        "model that it was trained on"
    )
    assert not any("lora" in name for name, _ in other.named_parameters())
    _with_tensor(tmp_path / "adapter", "base_model.model.inner.lora_B.weight", torch.zeros(6, 2))
    _with_tensor(tmp_path / "adapter", "base_model.model.gone.lora_A.weight", torch.zeros(2, 2))
    assert refused(adapters.load_adapter, other, tmp_path / "adapter", any_base=True) == (
        f"{tmp_path / 'adapter'}: the adapter changes `gone.weight`, and no program of 'Net' has such a weight. Load "
        "the bundle of the model that it was trained on"
    )


def _with_tensor(directory, key, tensor):
    from safetensors.torch import load_file, save_file

    path = directory / "adapter_model.safetensors"
    save_file({**load_file(path), key: tensor}, path, metadata={"format": "pt"})


def test_states_that_calls_do_not_allow_are_refused(module, tmp_path):
    assert refused(adapters.merge_adapter, module) == (
        "the module has no adapter to merge. Add one first (`add_lora`, `load_adapter`)"
    )
    with_ours(module)
    assert refused(aotexport_runtime.save, module, tmp_path / "tuned") == (
        "`words.weight` has an adapter, and `save` writes the programs that were exported, with other weights. Merge "
        "the adapter into the weights first (`aotexport_runtime.adapters.merge_adapter`), or write it alone "
        "(`save_adapter`)"
    )
    assert refused(adapters.set_adapter, module, "b") == "there is no adapter `b`; the module has `default`"
    assert refused(adapters.unmerge_adapter, module) == (
        "the module's weights hold no adapter. Merge one first (`merge_adapter`)"
    )
    adapters.merge_adapter(module)
    assert refused(adapters.disable_adapters, module) == (
        "adapters cannot be switched: the module's weights hold `default`. Call `unmerge_adapter` first"
    )
