"""The base of an adapter: the weights that it was trained over, by their values as they were then."""

import functools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, NotSupported, adapters
from tests.refusals import refusal

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def bundle(new_bundle):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return new_bundle(net, X)


@pytest.fixture
def module(bundle):
    return aotexport_runtime.load(bundle).train()


def trained(module, steps=3):
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()
    return module


def adapted(module, **options):
    adapters.add_lora(module, ["0"], r=2, **options)
    return trained(module)


refused = functools.partial(refusal, (ArgumentInvalid, NotSupported))


def other_weights(path, weight):
    return (
        f"{path}: the adapter was trained over other weights than 'Sequential' has now: `{weight}` differs. Load the "
        "bundle that it was trained over, or take it all the same (`any_base=True`)"
    )


def test_base_is_the_trained_weights_and_not_the_loaded_files(module, bundle, tmp_path):
    aotexport_runtime.save(trained(module), tmp_path / "tuned")
    adapters.save_adapter(adapted(module), tmp_path / "adapter")
    loaded = aotexport_runtime.load(bundle)
    assert refused(adapters.load_adapter, loaded, tmp_path / "adapter") == other_weights(
        tmp_path / "adapter", "0.weight"
    )
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    tuned = aotexport_runtime.load(tmp_path / "tuned").eval()
    adapters.load_adapter(tuned, tmp_path / "adapter")
    # Statistics of the batch norm are not in an adapter.
    tuned.load_state_dict(module.state_dict())
    assert torch.equal(tuned(X), module.eval()(X))


EDITS = {
    "beside the version": lambda weight: weight.data.mul_(2),
    "replaced": lambda weight: setattr(weight, "data", weight.data + 1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_weight_edited_in_memory_is_noticed_at_load_and_at_save(module, bundle, tmp_path, edit):
    adapters.save_adapter(adapted(module), tmp_path / "adapter")
    edited = aotexport_runtime.load(bundle)
    adapters.load_adapter(edited, tmp_path / "adapter")
    with torch.no_grad():
        edit(edited.get_parameter("3.weight"))
        edit(module.get_parameter("3.weight"))
    message = other_weights(tmp_path / "adapter", "3.weight")
    assert refused(adapters.load_adapter, edited, tmp_path / "adapter", name="b") == message
    assert refused(adapters.save_adapter, module, tmp_path / "late") == (
        "adapter `default` cannot be written: `3.weight` has changed since it was added, and its file does not hold "
        "that. Train the layer with the adapter (`modules_to_save`), add the adapter after the change, or write it as "
        "one of the weights as they are now (`any_base=True`)"
    )
    assert not (tmp_path / "late").exists()
    adapters.save_adapter(module, tmp_path / "late", any_base=True)
    adapters.load_adapter(edited, tmp_path / "late", name="b")


def test_merged_and_unmerged_weights_are_the_same_base(module, bundle, tmp_path):
    adapted(module)
    before = module.get_parameter("0.weight").clone()
    adapters.merge_adapter(module)
    adapters.unmerge_adapter(module)
    assert not torch.equal(before, module.get_parameter("0.weight"))
    adapters.save_adapter(module, tmp_path / "adapter")
    adapters.load_adapter(aotexport_runtime.load(bundle), tmp_path / "adapter")
    adapters.merge_adapter(module)
    with torch.no_grad():
        module.get_parameter("0.weight").data.add_(1)
    adapters.unmerge_adapter(module)
    assert "`0.weight` has changed" in refused(adapters.save_adapter, module, tmp_path / "late")


def test_weights_that_an_adapter_replaces_are_not_its_base(module, bundle, tmp_path):
    adapters.save_adapter(adapted(module, modules_to_save=["3"]), tmp_path / "adapter")
    other = aotexport_runtime.load(bundle)
    with torch.no_grad():
        other.get_parameter("3.weight").add_(1)
    adapters.load_adapter(other, tmp_path / "adapter")
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(X), module.eval()(X))


def test_weights_in_another_dtype_are_the_same_base(module, bundle, tmp_path):
    adapters.save_adapter(adapted(module), tmp_path / "single")
    half = aotexport_runtime.load(bundle, dtype=torch.bfloat16)
    adapters.load_adapter(half, tmp_path / "single")
    adapters.save_adapter(half, tmp_path / "half")
    adapters.load_adapter(aotexport_runtime.load(bundle), tmp_path / "half")
    with torch.no_grad():
        half.get_parameter("3.bias").add_(1)
    message = other_weights(tmp_path / "single", "3.bias")
    assert refused(adapters.load_adapter, half, tmp_path / "single", name="b") == message


def test_file_names_every_weight_once_and_broken_digests_are_refused(module, bundle, tmp_path):
    adapters.save_adapter(adapted(module), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        digests = json.loads(file.metadata()["aotexport_weights"])
    names = [name for name, _ in aotexport_runtime.load(bundle).named_parameters()]
    assert [*digests] == names
    save_file(load_file(path), path, metadata={"format": "pt", "aotexport_weights": "[1"})
    assert refused(adapters.load_adapter, aotexport_runtime.load(bundle), tmp_path).startswith(
        f"{tmp_path}: the digests of the adapter's base cannot be read: "
    )


@pytest.mark.parametrize(
    "new", [nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))], ids=["one", "several"]
)
def test_layer_that_was_replaced_is_named_and_can_be_left_out_or_trained_whole(module, new):
    module[3] = new
    message = (
        f"`3` was replaced by a `{type(new).__name__}`, and adapters are put beside layers of the bundle alone. Leave "
        "it out (`exclude=['3']`), train it whole (`modules_to_save=['3']`), or export the module with it "
        "(`aotexport.export(module, ...)`) and adapt that bundle"
    )
    for targets in ("all-linear", ["0", "3"]):
        assert refused(adapters.add_lora, module, targets) == message
    assert not any("lora" in name for name, _ in module.named_parameters())
    assert [t.name for t in adapters.add_lora(module, exclude=["3"]).targets] == ["0.weight"]
    adapters.delete_adapter(module, "default")
    report = adapters.add_lora(module, modules_to_save=["3"])
    assert [t.name for t in report.targets] == ["0.weight"]
    assert all(parameter.requires_grad for parameter in module[3].parameters())
