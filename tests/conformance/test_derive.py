"""A bundle of a bundle: what an export of the original with the same change gives, without the model's code."""

import contextlib
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import aotexport
from aotexport.cli.app import app
from aotexport_runtime import CallInvalid, NotSupported, adapters, load, open_bundle, selftest
from aotexport_runtime.schema.manifest import Ancestor
from tests.cases import all_cases
from tests.cases.operators import NAMESPACE
from tests.cases.subclasses import TYPES
from tests.models import module, seeded
from tests.refusals import refusal


class Model(nn.Module):
    """An encoder and a head, with dropout, a buffer that calls change, a method, and labels that may be left out."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels=None, *, scale=1.0):
        logits = self.head(self.dropout(self.encoder(x))) * scale
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels), logits


BATCH = torch.export.Dim("batch", min=2, max=64)
ARGUMENTS = ((torch.randn(6, 4), torch.arange(6) % 3), {})
OPTIONS = {"dynamic_shapes": {"x": {0: BATCH}, "labels": {0: BATCH}, "scale": None}, "verify": False}


def frozen(module):
    module.encoder.requires_grad_(False)
    return module


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("derive") / "base"
    aotexport.export(seeded(Model), *ARGUMENTS, output=path, **OPTIONS)
    return path


def files_of(bundle: Path) -> dict[str, object]:
    """Return what a bundle says of its calls: graphs as text, recorded calls as values to the bit, weights."""
    paths = [path for path in bundle.rglob("*") if path.is_file() and path.name not in ("bundle.json", "README.md")]
    return {path.relative_to(bundle).as_posix(): _content(path) for path in sorted(paths)}


def _content(path: Path) -> object:
    if path.suffix != ".safetensors":
        return path.read_text()
    tensors = load_file(path)
    return {key: (str(t.dtype), [*t.shape], t.reshape(-1).view(torch.uint8).tolist()) for key, t in tensors.items()}


def digest(bundle: Path) -> str:
    return hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()


def test_derived_bundle_is_the_bundle_of_the_model_with_the_same_changes(base, tmp_path):
    (x, labels), _ = ARGUMENTS
    rows = torch.export.Dim("rows", min=3, max=10)
    options = {"dynamic_shapes": {"x": {0: rows}, "labels": {0: rows}, "scale": None}, "verify": False}
    arguments = (x.to(torch.bfloat16), labels)
    aotexport.export(frozen(seeded(Model)).to(torch.bfloat16), arguments, output=tmp_path / "expected", **options)
    changes = {"freeze": "encoder.*", "dtype": torch.bfloat16, "dynamic": "x:0=rows[3:10]"}
    report = aotexport.derive(base, output=tmp_path / "derived", **changes)
    assert files_of(tmp_path / "derived") == files_of(tmp_path / "expected")
    assert report.manifest.ancestors == (
        Ancestor(
            name="Model",
            sha256=digest(base),
            changes=(
                "loaded in bfloat16",
                "frozen: `encoder.0.weight`, `encoder.0.bias`, `encoder.1.weight` and 3 more",
                "sizes `rows` from 3 to 10 instead of `batch` from 2 to 64",
            ),
        ),
    )
    joint = {path: len((path / "programs/train/joint.json").read_bytes()) for path in (base, tmp_path / "derived")}
    assert joint[tmp_path / "derived"] < 0.8 * joint[base]


def test_trained_module_begets_a_bundle_of_its_weights_and_is_left_alone(base, tmp_path):
    module, original = load(base).train(), seeded(Model).train()
    for each in (module, original):
        nn.init.ones_(each.head.weight)
        each.head.bias.requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    aotexport.derive(module, output=tmp_path / "first", freeze="encoder.*", programs="infer", verify=False)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [name for name, parameter in module.named_parameters() if not parameter.requires_grad] == ["head.bias"]
    report = aotexport.derive(tmp_path / "first", output=tmp_path / "second", programs="eval-joint", verify=False)
    assert report.manifest.ancestors == (
        Ancestor(
            name="Model", sha256=digest(tmp_path / "first"), changes=("programs eval-joint instead of infer, infer.2",)
        ),
        Ancestor(
            name="Model",
            sha256=digest(base),
            child=0,
            changes=(
                "frozen: `encoder.0.weight`, `encoder.0.bias`, `encoder.1.weight` and 4 more",
                "other values: `head.weight`",
                "programs infer, infer.2 instead of train, infer, infer.2",
            ),
        ),
    )
    frozen(original)
    aotexport.export(original, *ARGUMENTS, output=tmp_path / "expected", programs="eval-joint", **OPTIONS)
    assert files_of(tmp_path / "second") == files_of(tmp_path / "expected")


def test_module_that_holds_a_loaded_bundle_names_it_as_an_ancestor(base, tmp_path):
    holder, x = module(lambda self, x: self.base(x).relu(), base=load(base)), ARGUMENTS[0][0]
    report = aotexport.export(holder.eval(), (x,), output=tmp_path / "held", programs="infer", verify=False)
    assert report.manifest.ancestors == (Ancestor(name="Model", sha256=digest(base), path="base"),)


def test_command_line_derives_even_sizes_in_another_dtype_and_shows_of_which_bundle(base, tmp_path):
    runner, output = CliRunner(), str(tmp_path / "even")
    options = ["-o", output, "--freeze", "encoder.*", "--program", "infer", "--no-verify", "--json"]
    options += ["--dtype", "bfloat16", "--dynamic", "x:0=2*half"]
    made = runner.invoke(app, ["derive", str(base), *options])
    assert made.exit_code == 0, made.output
    assert [program["name"] for program in json.loads(made.stdout)["programs"]] == ["infer", "infer.2"]
    shown = " ".join(runner.invoke(app, ["inspect", output]).output.split())
    changes = "loaded in bfloat16; frozen: `encoder.0.weight`,"
    assert f"made of Model, sha256 {digest(base)[:12]} ({changes}" in shown
    even = load(output).eval()
    assert even(torch.rand(6, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    with pytest.raises(CallInvalid, match=r"holds only where \(\(half % 2\) == 0\); here half=5"):
        even(torch.rand(5, 4, dtype=torch.bfloat16))


def grad_mode():
    """Code that asks whether gradients are recorded, after a region in which none are."""

    def forward(self, x):
        with torch.no_grad():
            x = x * self.layer(x).sum()
        return self.layer(x) * (2 if torch.is_grad_enabled() else 3)

    return module(forward, layer=nn.Linear(4, 4))


def test_each_program_is_made_of_the_one_of_its_grad_mode(tmp_path):
    torch.manual_seed(0)
    programs = ("train", "infer", "eval-joint")
    aotexport.export(grad_mode(), (torch.ones(2, 4),), output=tmp_path / "base", programs=programs, verify=False)
    aotexport.derive(tmp_path / "base", output=tmp_path / "derived", verify=False)
    assert files_of(tmp_path / "derived") == files_of(tmp_path / "base")


# --- another dtype, fewer sizes ---------------------------------------------------------------------------


class Sequences(nn.Module):
    """Two dynamic sizes, one of them in two arguments, and a size that is fixed."""

    def forward(self, x, mask, steps):
        return (x * mask).sum(1) / x.shape[2] * steps


@pytest.fixture(scope="module")
def sequences(new_bundle):
    rows, length = torch.export.Dim("rows", min=2, max=8), torch.export.Dim("length", min=2)
    shapes = {"x": {0: rows, 1: length}, "mask": {0: rows, 1: length}, "steps": torch.export.Dim("steps", max=9)}
    arguments = (torch.rand(3, 5, 4), torch.ones(3, 5, 1), 2)
    return new_bundle(Sequences().eval(), *arguments, dynamic_shapes=shapes, programs="infer")


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["mask:1=n[4:32]"], {"rows": (2, 8), "n": (4, 32), "steps": (0, 9)}),
        (["x:1=length[:32]"], {"rows": (2, 8), "length": (2, 32), "steps": (0, 9)}),
        (["steps=s[1:4]", "x:0=b"], {"b": (2, 8), "length": (2, None), "s": (1, 4)}),
    ],
)
def test_sizes_and_integers_are_narrowed_wherever_they_occur(sequences, tmp_path, options, sizes):
    aotexport.derive(sequences, output=tmp_path / "fewer", dynamic=options, verify=False)
    program = open_bundle(tmp_path / "fewer").program("infer")
    assert {size.name: (size.min, size.max) for size in program.dimensions} == sizes


def test_sizes_of_one_name_are_equal_from_then_on(tmp_path, new_bundle):
    # The range is what both places take.
    x, a, b = torch.rand(5, 5, 4), torch.export.Dim("a", min=2, max=8), torch.export.Dim("b", min=3)
    shapes = {"x": {0: a, 1: b}, "mask": {0: a, 1: b}, "steps": None}
    square = new_bundle(Sequences().eval(), x, torch.ones(5, 5, 1), 2, programs="infer", dynamic_shapes=shapes)
    aotexport.derive(square, output=tmp_path / "equal", dynamic=["x:0=n", "x:1=n"], verify=False)
    (size,) = open_bundle(tmp_path / "equal").program("infer").dimensions
    assert (size.name, size.min, size.max) == ("n", 3, 8)
    with pytest.raises(CallInvalid):
        load(tmp_path / "equal")(torch.rand(4, 5, 4), torch.ones(4, 5, 1), 2)


def test_variant_for_one_row_stays_where_sizes_are_narrowed(tmp_path):
    def special_at_one(x):
        return x * 100 if x.shape[0] == 1 else x

    rows = {0: torch.export.Dim("rows", min=1)}
    aotexport.export(special_at_one, (torch.ones(4, 2),), output=tmp_path / "base", dynamic_shapes=(rows,))
    aotexport.derive(tmp_path / "base", output=tmp_path / "fewer", dynamic="x:0=rows[2:8]")
    module = load(tmp_path / "fewer")
    assert [float(module(torch.ones(rows, 2)).max()) for rows in (1, 2, 8)] == [100, 1, 1]
    with pytest.raises(CallInvalid):
        module(torch.ones(9, 2))


# --- bad input --------------------------------------------------------------------------------------------


def wrong(base, tmp_path, **options):
    with pytest.raises(aotexport.AotExportError) as caught:
        aotexport.derive(base, output=tmp_path / "wrong", verify=False, **options)
    assert not (tmp_path / "wrong").exists()
    return str(caught.value)


def test_pattern_that_matches_nothing_is_refused_with_the_nearest_names(base, tmp_path):
    assert wrong(base, tmp_path, freeze="heads.weight") == (
        "freeze: `heads.weight` matches no parameter of the bundle; the nearest are `head.weight`, `encoder.3.weight`, "
        "`encoder.1.weight`"
    )


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("x:0=n[1:4]", "the bundle takes sizes from 2 to 8 there, and its graphs hold for no others"),
        ("steps=n[-1:4]", "the bundle takes integers from 0 to 9 there, and its graphs hold for no others"),
        (
            "x:2=n",
            "the bundle was captured for size 4 alone. A graph does not tell where the model's code read it as a "
            "number: export the model with this option",
        ),
        ("x:3=n", "the tensor has 3 axes in the example call, no axis 3"),
        ("y:0=n", "there is no such tensor in the example call; its tensors are x, mask; its integers are steps"),
        ("x=n", "it is a tensor; say which of its axes, INPUT:AXIS=NAME"),
    ],
)
def test_sizes_that_the_bundle_does_not_take_are_refused(sequences, tmp_path, option, why):
    assert wrong(sequences, tmp_path, dynamic=option) == f"--dynamic {option!r}: {why}"


def test_dtype_of_a_changed_module_is_refused(base, tmp_path):
    module = load(base)
    module.head = nn.Linear(8, 5)
    way_out = "Load the bundle in that dtype (`load(dtype=)`), and change that"
    assert wrong(module, tmp_path, dtype=torch.bfloat16) == f"`dtype`: `head` was replaced by a `Linear`. {way_out}"
    assert wrong(base, tmp_path, dtype=torch.int8) == (
        "`dtype`: expected one of bfloat16, float16, float32, float64, got int8"
    )


def test_change_without_what_it_changes_is_refused(base, sequences, tmp_path):
    assert (
        wrong(base, tmp_path, merge=True)
        == "merge: there is no adapter to merge; give its directory (`lora`, `--lora`)"
    )
    beside = "beside that of a language model's scores"
    assert wrong(sequences, tmp_path, quantize="int8") == f"quantize: the bundle has no linear layer for int8, {beside}"
    assert wrong(base, tmp_path, quantize="int4") == (
        f"quantize: the bundle has no linear layer for int4, {beside}; int4 takes inputs in groups of 32"
    )


def test_program_of_a_mode_that_the_bundle_lacks_is_refused(base, tmp_path):
    aotexport.derive(base, output=tmp_path / "infer", programs="infer", verify=False)
    assert wrong(tmp_path / "infer", tmp_path, programs="train") == (
        f"program `train` is of train mode, and the bundle `{tmp_path / 'infer'}` has only `infer` (eval mode): what "
        "the model does in the other mode is not in it. Export the model with both"
    )
    assert wrong(base, tmp_path, programs="predict") == "no program `predict`; there are train, infer, eval-joint"


def test_bundle_whose_calls_change_attributes_is_refused(tmp_path):
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    aotexport.export(Counting().eval(), (torch.ones(2),), output=tmp_path / "base", verify=False)
    assert wrong(tmp_path / "base", tmp_path) == (
        f"calls of the bundle `{tmp_path / 'base'}` change attributes of the module (`calls`), which a bundle made of "
        "it would not keep. Export the model"
    )


def test_bundle_that_was_captured_under_autocast_is_refused(tmp_path):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        aotexport.export(nn.Linear(2, 2).eval(), (torch.ones(2, 2),), output=tmp_path / "base", verify=False)
    assert wrong(tmp_path / "base", tmp_path) == (
        f"program `train` of `{tmp_path / 'base'}` was captured under autocast. Make the new bundle under it too: "
        '`with torch.autocast("cpu", dtype=torch.bfloat16): aotexport.export(module, ...)`'
    )


# --- the cases --------------------------------------------------------------------------------------------

SLICE = ("hook_that_clips", "function_with_saved_intermediates", "branches", "arrays_of_tensors", "dynamic_integers")
"""Cases that derive in the quick suite; every other one derives in the slow test."""


def derived(case, directory):
    """Export a case, derive a bundle of it without a change, and return both."""
    target, args, kwargs = case.make()
    options = {"verify": False} | case.options
    with warnings.catch_warnings():
        # Operators with bodies make torch compile, which warns of its own deprecations.
        warnings.simplefilter("ignore")
        aotexport.export(target, args, kwargs, output=directory / "base", **options)
        module = load(directory / "base", tensor_types=TYPES, operator_namespaces=[NAMESPACE])
        aotexport.derive(module, output=directory / "derived", verify=options["verify"])
    return directory / "base", directory / "derived"


REFUSED = {
    # A graph says which size it takes, and no longer by which function of Python the code computed it.
    "python_functions_of_sizes": "`x`: axis 0 was declared dynamic as `batch`, and the model works only for size 4",
    # Its functional graph alone has the derivatives.
    "dual_numbers": "the module's custom autograd functions are only in its joint graph",
    "keywords_named_like_parameters": "got an unexpected keyword argument 'x'",
    "sum_in_a_list_held_by_two_modules": "change attributes of the module",
    # A loaded module is not traced again with what its calls leave.
    "buffer_that_grows": "a call turns `seen` of the model from float32[2, 3] into float32[4, 3]",
}
"""Cases that no bundle is derived of, with what the refusal says."""

ROUNDED = (
    # Eager computes gradients by functions of its own there, and a graph by those of its operators.
    *("attention_with_scores", "checkpoints_that_drop", "map_over_rows", "steps_over_parameters"),
    *("computed_by_functions_of_numpy", "operators_that_read_values"),
    "sampled_where_a_grid_says",
)
"""Cases whose values differ by rounding: the loaded module is the reference of the derived bundle."""


def recorded(bundle: Path) -> dict[str, Any]:
    return {name: content for name, content in files_of(bundle).items() if name.startswith("testvectors/")}


def same_records(before: Path, after: Path, case: str) -> None:
    """Compare recorded calls: what was asked and seen, and values to the bit."""
    expected, found = recorded(before), recorded(after)
    assert found.keys() == expected.keys()
    for name, content in found.items():
        if case in ROUNDED and name.endswith(".safetensors"):
            torch.testing.assert_close(load_file(after / name), load_file(before / name), rtol=1e-5, atol=1e-6)
        elif case == "variadic" and isinstance(content, str):
            # Its signature names each keyword that the example passed.
            text = expected[name].replace("kwargs['a']", "a")
            assert sorted(content.replace(",", "").split()) == sorted(text.replace(",", "").split())
        else:
            assert content == expected[name], name


def functional(bundle: Path) -> dict[str, bool]:
    """Return which programs have a joint or inference graph."""
    opened = open_bundle(bundle)
    return {name: opened.program(name).functional is not None for name in opened.program_names}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in SLICE)) for case in all_cases()],
)
def test_bundle_of_a_case_begets_one_with_the_same_results(case, tmp_path):
    if case.name in REFUSED:
        assert REFUSED[case.name] in refusal(aotexport.AotExportError, derived, case, tmp_path)
        return
    before, after = derived(case, tmp_path)
    same_records(before, after, case.name)
    assert functional(after) == functional(before)
    selftest(after, tensor_types=TYPES, operator_namespaces=[NAMESPACE])


def test_derived_bundle_has_an_adapter_beside_its_weights_or_in_them(base, tmp_path):
    module = load(base).train()
    adapters.add_lora(module, ["encoder.0", "head"], r=2, alpha=4, bias="lora_only")
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    adapters.save_adapter(module, tmp_path / "adapter")
    expected = module.eval()(ARGUMENTS[0][0])
    aotexport.derive(base, output=tmp_path / "beside", lora=tmp_path / "adapter", verify=False)
    options = ["-o", str(tmp_path / "merged"), "--lora", str(tmp_path / "adapter"), "--merge", "--no-verify"]
    assert CliRunner().invoke(app, ["derive", str(base), *options]).exit_code == 0
    beside, merged = load(tmp_path / "beside").eval(), load(tmp_path / "merged").eval()
    for derived in (beside, merged):
        torch.testing.assert_close(derived(ARGUMENTS[0][0]), expected)
    assert not beside.encoder[0].weight.requires_grad
    assert [name for name, parameter in merged.named_parameters() if not parameter.requires_grad] == []
    assert merged.state_dict().keys() == load(base).state_dict().keys()
    changes = beside.bundle.manifest.ancestors[0].changes
    assert changes[0] == "adapters on `encoder.0.weight`, `encoder.0.bias`, `head.weight` and 1 more"


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight that the parts of a quantised layer stand for, as torchao computes it."""
    integers, scale = layer._weight_qdata, layer._weight_scale
    if not hasattr(layer, "_weight_zero_point"):
        return integers * scale
    high = integers.div(16, rounding_mode="floor")
    groups = (
        torch.stack([integers - 16 * high, high], -1).add(8).remainder(16).sub(8).view(len(integers), len(scale), -1)
    )
    return (groups * scale.t()[..., None] + layer._weight_zero_point.t()[..., None]).flatten(1)


class Product(nn.Module):
    """A product with a matrix of inputs by outputs, as those of GPT-2, and a sum with its input where `adds`."""

    def __init__(self, adds):
        super().__init__()
        self.adds, self.weight, self.bias = adds, nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))

    def forward(self, x):
        made = torch.addmm(self.bias, x.view(-1, 64), self.weight).view(x.shape)
        return made + x if self.adds else made


def test_layers_of_other_classes_are_quantised_where_they_compute_a_product_alone(tmp_path, new_bundle):
    network, x = nn.Sequential(Product(True), Product(False)), torch.randn(2, 3, 64)
    aotexport.derive(new_bundle(network, x), output=tmp_path / "small", quantize="int8", verify=False)
    module = load(tmp_path / "small")
    assert [name for name, layer in module.named_children() if hasattr(layer, "_weight_qdata")] == ["1"]
    network[1].weight.data.copy_(weight_of(module.get_submodule("1")).t())
    torch.testing.assert_close(module(x), network(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_adapters_train_over_integers_as_over_the_weights_they_stand_for(scheme, tmp_path, new_bundle):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 5))
    x, labels = torch.randn(7, 64), torch.arange(7) % 5
    aotexport.derive(new_bundle(network, x), output=tmp_path / "small", quantize=scheme, verify=False)
    module = load(tmp_path / "small").train()
    quantised = [name for name, layer in module.named_children() if hasattr(layer, "_weight_qdata")]
    assert quantised == (["0", "2"] if scheme == "int4" else ["0", "2", "4"])
    for name in quantised:
        layer, weight = module.get_submodule(name), network.get_submodule(name).weight.data
        assert (weight_of(layer) - weight).abs().max() <= 0.501 * layer._weight_scale.max() + 1e-7
        weight.copy_(weight_of(layer))
    torch.manual_seed(1)
    twin = peft.get_peft_model(network, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2", "4"]))
    torch.manual_seed(1)
    adapters.add_lora(module, "all-linear", r=4, alpha=8)
    saved, losses = list[int](), dict[nn.Module, list[float]]()
    for each in (module, twin):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(5):
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
            with hooks if each is module else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(each(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(each, []).append(loss.item())
    assert losses[module] == pytest.approx(losses[twin], abs=1e-6)
    assert losses[module][-1] < losses[module][0]
    assert max(saved) < 64 * 48
    pairs = [x.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((module, twin), pairs, strict=True):
        loss = nn.functional.cross_entropy(each(given), labels)
        torch.autograd.grad(loss, given, create_graph=True)[0].square().sum().backward()
    torch.testing.assert_close(pairs[0].grad, pairs[1].grad)
    with pytest.raises(NotSupported, match=r"^`0.weight` is quantised, and no integers hold a merged weight\. "):
        adapters.merge_adapter(module)
