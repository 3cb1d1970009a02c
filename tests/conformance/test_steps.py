"""Whole training steps: equal to eager's with an optimizer of torch, step by step."""

import copy
import itertools
import json
import math
import operator
import shutil
from collections import Counter

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import aotexport
from aotexport.capture.functional.optimizer import moments_of, update_graph
from aotexport.torch_internals.calls import tree_leaves
from aotexport_runtime import CallInvalid, adapters, load, open_bundle
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.optimizer import optimizer_of, state_of
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.rewrite.updates import UPDATE, with_fused_updates

BATCH = torch.export.Dim("batch", min=2, max=64)
SIZES = {"x": {0: BATCH}, "labels": {0: BATCH}}


class Model(nn.Module):
    """Layers that share a weight, dropout, batch statistics, constants, a layer not called, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.shifts = [torch.full((6,), 0.1, dtype=torch.float64)]
        self.norm, self.unused, self.frozen = nn.BatchNorm1d(6), nn.Linear(2, 2), nn.Linear(6, 4).requires_grad_(False)
        self.rows = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(6), nn.Dropout(0.0))

    def forward(self, x, labels):
        hidden = nn.functional.dropout(self.norm(self.first(x).relu()) + self.shifts[0], 0.2, self.training)
        rows = torch.stack([hidden, hidden.square(), x], 1)
        first = (self.rows(rows) * hidden.mean() + rows)[:, 0]
        return nn.functional.cross_entropy(self.factor * self.frozen(self.second(first).tanh()), labels), hidden


def batches():
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        size = 5 + seed % 2
        yield (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randint(4, (size,), generator=generator),
        )


class Lion(torch.optim.Optimizer):
    """An optimizer of a user: numbers of Python, state that a first step makes, a step count that is an integer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), kind="lion"):
        super().__init__(params, {"lr": lr, "betas": betas, "kind": kind})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])

    def update(self, group, parameter, state):
        if not state:
            state.update(step=0, ahead=torch.zeros_like(parameter), most=torch.ones(()))
        state["step"] += 1
        state["most"].mul_(0.9).add_(parameter.grad.abs().max().item(), alpha=0.1)
        rate = group["lr"] * math.sqrt(min(1.0, state["step"] / 10)) / max(1e-3, state["most"].item())
        parameter.add_((state["ahead"] * group["betas"][0]).add(parameter.grad).sign_(), alpha=-rate)
        state["ahead"].lerp_(parameter.grad, 1 - group["betas"][1])


class Branching(Lion):
    """Its code branches on values."""

    def update(self, group, parameter, state):
        if parameter.grad.norm() > 1:
            parameter.add_(parameter.grad, alpha=-group["lr"])


class Rising(Lion):
    """It counts steps in its group."""

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["betas"] = (self.param_groups[0]["betas"][0] + 0.01, 0.9)


def make(tmp_path, step, **options):
    """Return the model in train mode, and a bundle of it with a step, loaded."""
    torch.manual_seed(0)
    model = Model().double()
    given = {"programs": ("train",), "dynamic_shapes": SIZES, "verify": False, **options}
    aotexport.export(model, next(batches()), output=tmp_path / "bundle", step=step, **given)
    return model.train(), load(tmp_path / "bundle").train()


def assert_equal(model, module):
    found = module.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def steps_alike(model, module, optimizer, stepper, count, *, max_norm=None, schedulers=()):
    """Make steps of both on the same batches, and compare losses and state."""
    for seed, batch in zip(range(count), batches(), strict=False):
        torch.manual_seed(seed)
        model.zero_grad()
        loss, _ = model(*batch)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        torch.manual_seed(seed)
        torch.testing.assert_close(stepper(*batch), loss.detach())
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(model, module)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("step", "optimizer"),
    [
        ("sgd:lr=0.1,momentum=0.9,nesterov=True,weight_decay=0.01", torch.optim.SGD),
        pytest.param(
            *("adagrad:lr=0.05,lr_decay=0.1,initial_accumulator_value=0.1", torch.optim.Adagrad), marks=pytest.mark.slow
        ),
        pytest.param("adam:weight_decay=0.01,amsgrad=True", torch.optim.Adam, marks=pytest.mark.slow),
        pytest.param("rmsprop:momentum=0.5,centered=True", torch.optim.RMSprop, marks=pytest.mark.slow),
        pytest.param("adafactor:lr=0.05,weight_decay=0.1", torch.optim.Adafactor, marks=pytest.mark.slow),
        pytest.param("nadam:weight_decay=0.1", torch.optim.NAdam, marks=pytest.mark.slow),
        (f"{__name__}:Lion:betas=(0.8, 0.9)", Lion),
    ],
)
def test_steps_change_a_module_as_the_optimizer_of_torch(tmp_path, step, optimizer):
    model, module = make(tmp_path, step)
    options = aotexport.model.step.step_of(step).options
    theirs, ours = optimizer(trained(model), **options), module.stepper()
    schedulers = [StepLR(each, 5) for each in (theirs, ours)]
    steps_alike(model, module, theirs, ours, 20, schedulers=schedulers)
    with pytest.raises(NotSupported, match="does not clip"):
        module.stepper(max_norm=1.0)


def test_groups_clipping_and_resumed_state_are_those_of_torch(tmp_path):
    step = aotexport.Step(
        "adamw", {"weight_decay": 0.1}, {"*.bias norm.*": {"weight_decay": 0.0, "lr": 0.01}}, clip=True
    )
    model, module = make(tmp_path, step, verify="fast")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    graph = module.bundle.graph("step", module.bundle.program("step").forward.file)
    assert [len(node.meta.shape) for node in graph.nodes if node.op == "aten::gelu.default"] == [2]
    # Not of the layer that is not called.
    assert sum(node.op == UPDATE for node in with_fused_updates(graph)) == len(trained(model)) - 2
    small = [parameter for name, parameter in named.items() if name.endswith("bias") or name.startswith("norm")]
    others = [parameter for parameter in named.values() if all(parameter is not each for each in small)]
    groups = [{"params": others}, {"params": small, "weight_decay": 0.0, "lr": 0.01}]
    theirs, ours = torch.optim.AdamW(groups, weight_decay=0.1), module.stepper(max_norm=0.1)
    steps_alike(model, module, theirs, ours, 10, max_norm=0.1)
    reached = copy.deepcopy(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    resumed = module.stepper(max_norm=0.1)
    resumed.load_state_dict(reached)
    steps_alike(model, module, theirs, resumed, 10, max_norm=0.1)
    for each in (resumed, theirs):
        each.load_state_dict(reached)
    steps_alike(model, module, theirs, resumed, 5, max_norm=0.1)
    tuned = aotexport.derive(module, output=tmp_path / "derived", freeze="norm.*", verify=False)
    assert [program.record.name for program in tuned.programs] == ["train", "step"]
    for name, parameter in model.named_parameters():
        if name.startswith("norm"):
            parameter.requires_grad_(False)
    derived = load(tmp_path / "derived").train()
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    theirs = torch.optim.AdamW(groups, weight_decay=0.1)
    steps_alike(model, derived, theirs, derived.stepper(max_norm=0.1), 5, max_norm=0.1)


def test_what_a_step_does_not_follow_is_refused(tmp_path):
    _, module = make(tmp_path, "adamw")
    stepper, batch = module.stepper(), next(batches())
    before = copy.deepcopy(module.state_dict())
    OneCycleLR(stepper, 0.1, total_steps=10)
    with pytest.raises(NotSupported, match="`betas` of the optimizer is fixed"):
        stepper(*batch)
    stepper = module.stepper(lr=0.1)
    with pytest.raises(NotSupported, match="makes the whole step when it is called"):
        stepper.step()
    module.eval()
    with pytest.raises(NotSupported, match=r"call `.train\(\)` first"):
        stepper(*batch)
    module.train().norm.eval()
    with pytest.raises(NotSupported, match="`norm` is in eval mode"):
        stepper(*batch)
    module.norm.train().weight.requires_grad_(False)
    with pytest.raises(NotSupported, match=r"`norm\.weight` was frozen or thawed"):
        stepper(*batch)
    module.norm.weight.requires_grad_(True)
    for hooked in (module, module.norm, module.norm.weight):
        register = hooked.register_hook if hooked is module.norm.weight else hooked.register_forward_hook
        hook = register(lambda *given: None)
        with pytest.raises(NotSupported, match="hook"):
            stepper(*batch)
        hook.remove()
    adapters.add_lora(module, ["frozen"], r=2)
    with pytest.raises(NotSupported, match="the module has an adapter"):
        module.stepper()(*batch)
    adapters.delete_adapter(module, "default")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("frozen"))
    with pytest.raises(CallInvalid, match="autocast: expected none"), torch.autocast("cpu"):
        stepper(*batch)
    state = stepper.state_dict()
    state["state"][0]["step"] += 1
    with pytest.raises(NotSupported, match="different numbers of steps"):
        stepper.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert next(iter(stepper.state.values()))["exp_avg"].abs().max() == 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("lion", "no optimizer `lion`"),
        ("sgd:momentum", "no optimizer with options"),
        ("sgd:betas=(0.9, 0.9)", "SGD takes no `betas`"),
        ("sgd:momentum=0.9,dampening=0.5", "`dampening` counts from the second step"),
        (f"{__name__}:Model", "no optimizer `.*:Model`"),
    ],
)
def test_steps_that_no_optimizer_makes_are_refused(step, message):
    with pytest.raises(aotexport.ModelFileInvalid, match=message):
        aotexport.model.step.step_of(step)


@pytest.mark.parametrize("wrong", [{"options": [1]}, {"groups": [1]}, {"groups": {"*": 3}}, {"outputs": ["logits"]}])
def test_descriptions_of_steps_of_other_types_are_refused(wrong):
    with pytest.raises(ArgumentInvalid, match=r"expected .*, got (int|list)"):
        aotexport.Step(**wrong)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Branching, r"test_steps:Branching cannot be followed.*test_steps.py:\d+: in update: .*_local_scalar_dense"),
        (Rising, "test_steps:Rising counts by `betas`"),
        (torch.optim.ASGD, "ASGD has state that does not begin as one number"),
    ],
)
def test_optimizers_that_no_program_follows_are_refused(optimizer, message):
    parameter, step = torch.ones(2, 3), aotexport.Step(optimizer)
    with pytest.raises(aotexport.ExportFailed, match=message):
        update_graph(step, {}, moments_of(step, {}, parameter), parameter)


class Several(nn.Module):
    """Returns two numbers that require grad."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(2, 2), make

    def forward(self, x):
        hidden = self.layer(x)
        return self.make(hidden, hidden.abs().mean(), hidden.square().mean())


class OfArrays(nn.Linear):
    def forward(self, array):
        return super().forward(torch.as_tensor(array)).sum()


def test_the_loss_is_the_one_number_or_the_one_that_is_named_so(tmp_path):
    torch.manual_seed(0)
    model, x = (
        Several(lambda hidden, penalty, loss: [hidden, hidden, {"penalty": penalty, "loss": loss}]),
        torch.ones(3, 2),
    )
    aotexport.export(model, (x,), output=tmp_path / "named", programs=("train",), step="sgd", verify="fast")
    assert load(tmp_path / "named").train().stepper()(x) == model(x)[2]["loss"]
    unnamed = Several(lambda hidden, penalty, loss: (hidden, penalty, loss))
    with pytest.raises(aotexport.ExportFailed, match=r"several results may be the loss: `output\[1\]`, `output\[2\]`"):
        aotexport.export(unnamed, (x,), output=tmp_path / "unnamed", step="sgd")
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True), Several(lambda hidden, penalty, loss: loss))
    with pytest.raises(aotexport.ExportFailed, match="a gradient is sparse"):
        aotexport.export(sparse, (torch.tensor([0, 2]),), output=tmp_path / "sparse", programs=("train",), step="sgd")
    with pytest.raises(aotexport.ExportFailed, match="returns no loss"):
        aotexport.export(nn.Linear(2, 2), (x,), output=tmp_path / "none", step="adamw")
    with pytest.raises(aotexport.ExportFailed, match="takes arrays of numpy"):
        aotexport.export(OfArrays(2, 2), (x.numpy(),), output=tmp_path / "arrays", programs=("train",), step="sgd")
    assert [path.name for path in tmp_path.iterdir()] == ["named"]


class Told(nn.Module):
    """Returns results beside the loss: of its layer, of memory that the step writes, and one twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.layer(x)
        return {"loss": hidden.square().mean(), "hidden": hidden, "turned": hidden.t(), "weight": self.layer.weight}


def test_gradients_add_up_and_chosen_results_come_with_the_loss(tmp_path):
    torch.manual_seed(0)
    model, given = Told(), torch.randn(9, 3, 2)
    step = "adamw:lr=0.1,clip=True,accumulate=True,outputs='hidden turn* weight'"
    aotexport.export(model, (given[0],), output=tmp_path / "bundle", programs=("train",), step=step, verify="fast")
    module = load(tmp_path / "bundle").train()
    theirs, ours = torch.optim.AdamW(model.parameters(), lr=0.1), module.stepper(max_norm=0.1)
    ours.scale = 1 / 3
    for parts in given.unflatten(0, (3, 3)):
        theirs.zero_grad()
        for part in parts:
            expected = model(part)
            (expected["loss"] / 3).backward()
        for part in parts[:2]:
            (module(part)["loss"] / 3).backward()
        loss, found = ours(parts[2])
        assert list(found) == ["hidden", "turned", "weight"]
        for name, value in {"loss": loss, **found}.items():
            torch.testing.assert_close(value, expected[name].detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        theirs.step()
        assert_equal(model, module)
    with pytest.raises(aotexport.ModelFileInvalid, match="no result `logits`; there are loss, hidden, turned, weight"):
        aotexport.export(model, (given[0],), output=tmp_path / "none", step="sgd:outputs='logits'", programs=("train",))


class Words(nn.Module):
    """An embedding and a layer: a library checks the indices."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, words, labels):
        return nn.functional.cross_entropy(self.head(self.norm(self.table(words).mean(1))), labels)


@pytest.mark.slow
def test_steps_by_libraries_are_written_in_place_or_not_at_all(tmp_path):
    torch.manual_seed(0)
    words, labels = torch.randint(20, (6, 4)), torch.randint(3, (6,))
    options = {"programs": ("train",), "targets": ("portable", "cpu"), "step": "adamw:lr=0.01"}
    report = aotexport.export(Words().double(), (words, labels), output=tmp_path / "bundle", **options)
    assert not report.notes
    by_library = load(tmp_path / "bundle", target="cpu", trust="native").train()
    by_graph = load(tmp_path / "bundle", target="autograd").train()
    nodes = by_graph.bundle.graph("step", by_graph.bundle.program("step").forward.file).nodes
    read = Counter(name for node in nodes for name in operands(node))
    copied = [node.args[1] for node in nodes if node.op == "aten::copy_.default"]
    assert {read[name] for name in copied} == {1}, "backward keeps values that the buffers hold"
    steppers = [module.stepper() for module in (by_library, by_graph)]
    for _ in range(5):
        losses = [stepper(words, labels) for stepper in steppers]
        torch.testing.assert_close(*losses)
    assert_equal(by_graph, by_library)
    assert min(module.table.weight._version for module in (by_library, by_graph)) >= 5
    assert "has run: forward by cpu" in str(steppers[0]._plan.record)
    before = copy.deepcopy((by_library.state_dict(), steppers[0].state_dict()["state"]))
    words[2, 1] = 20
    with pytest.raises(IndexError, match="index out of range"):
        steppers[0](words, labels)
    after = by_library.state_dict(), steppers[0].state_dict()["state"]
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(old, new)


class Counting(nn.Module):
    """Has a method that is named as the training step is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.layer(x).square().mean()

    def step(self, x):
        self.seen.add_(x.sum(0))
        return self.layer(x).exp() * 3 * self.seen


def test_a_method_of_the_module_may_be_named_step(tmp_path, new_bundle):
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.ones(3, 2)
    own = aotexport.Program("step", grad=True, method="step", example=(x,))
    module = load(new_bundle(model, x, programs=("infer", own)), target="autograd").eval()
    results = module.step(x), model.step(x)
    assert torch.equal(*results)
    for result in results:
        result.sum().backward()
    assert torch.equal(module.layer.weight.grad, model.layer.weight.grad)
    assert torch.equal(module.seen, model.seen)
    with pytest.raises(NotSupported, match="has no whole training step"):
        module.stepper()
    with pytest.raises(aotexport.ModelFileInvalid, match="program `step` is of the method `step`"):
        aotexport.export(model, (x,), output=tmp_path / "both", programs=("train", own), step="sgd", verify=False)


@pytest.fixture(scope="module")
def stepping(new_bundle):
    return new_bundle(Counting(), torch.ones(3, 2), programs=("train",), step="sgd")


def test_steps_in_onnx_runtime_are_those_of_the_graph(stepping, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    shutil.copytree(stepping, tmp_path / "bundle")
    aotexport.export_onnx(tmp_path / "bundle", verify=False)
    ours, theirs = load(tmp_path / "bundle", target="onnx"), load(tmp_path / "bundle").train()
    steppers = [module.stepper(lr=0.1) for module in (ours, theirs)]
    held = []
    for x in (torch.ones(3, 2), torch.eye(3, 2), torch.ones(3, 2)):
        by_model, by_graph = steppers[0](x.numpy()), steppers[1](x)
        assert by_model == pytest.approx(by_graph.item(), rel=1e-6)
        held.append([steppers[0].state_dict()[name] for name in ("layer.weight", "layer.bias")])
    assert all(map(operator.is_, held[0], held[2]))
    found = steppers[0].state_dict()
    assert list(found) == ["layer.weight", "layer.bias"]
    for name, array in found.items():
        torch.testing.assert_close(torch.from_numpy(array), theirs.state_dict()[name])
    ours.state.clear()
    expected = load(tmp_path / "bundle").train().stepper()(torch.ones(3, 2)).item()
    assert steppers[0](torch.ones(3, 2).numpy()) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(NotSupported, match=r"a training step, which `module.stepper\(\)` makes"):
        ours.program("step")
    with pytest.raises(NotSupported, match="does not clip"):
        ours.stepper(max_norm=1.0)
    for stepper, x in zip(steppers, (torch.ones(3, 2).numpy(), torch.ones(3, 2)), strict=True):
        stepper.max_norm = 1.0
        with pytest.raises(NotSupported, match="does not clip"):
            stepper(x)
    steppers[0].lr, steppers[0].max_norm = [0.1, 0.2], math.inf
    with pytest.raises(ArgumentInvalid, match="the optimizer has 1 groups of parameters, got 2 rates"):
        steppers[0](torch.ones(3, 2).numpy())


def test_state_of_parameters_that_the_bundle_does_not_store_is_refused(stepping):
    bundle = open_bundle(stepping)
    large = [msgspec.structs.replace(entry, shape=(1 << 20, 1 << 20)) for entry in bundle.manifest.state]
    manifest = msgspec.structs.replace(bundle.manifest, state=tuple(large))
    with pytest.raises(NotSupported, match="are larger than its files"):
        state_of(optimizer_of(manifest), manifest, bundle.program("step"))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("updates", ["layer.weight", "nothing"], "its groups do not have the parameters"),
        ("optimizer", 3, "is malformed"),
        ("parameters", ["layer.weight", "layer.bias", "nothing"], "names `nothing`, which is no parameter"),
        ("options", {"lr": "1"}, "is malformed"),
        ("accumulate", True, "does not fit the state that its program takes"),
    ],
)
def test_an_extension_that_contradicts_the_program_is_refused(stepping, tmp_path, place, value, message):
    shutil.copytree(stepping, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "bundle.json"
    record = json.loads(manifest.read_text())
    extension = record["extensions"]["x-aotexport-step"]
    (extension if place in extension else extension["groups"][0])[place] = value
    manifest.write_text(json.dumps(record))
    module = load(tmp_path / "bundle").train()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(NotSupported, match=message):
        module.stepper()(torch.ones(3, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
