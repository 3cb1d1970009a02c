"""Changes of a loaded module: each is followed, to the bit as eager does with the same change, or refused by name."""

import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

import aotexport
from aotexport_runtime import NotSupported, load, save
from tests import models
from tests.models import seeded
from tests.refusals import refusal


class Block(nn.Module):
    """A class of the model's own, with state of its own, structures in and out, and a submodule."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.inner = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, gain=1.0):
        self.calls.add_(1)
        return {"x": self.inner(x) * self.scale * gain, "kept": x}


class Model(nn.Module):
    """Submodules of torch's classes and of its own, in lists and by name, called once and twice, and not called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))
        self.block = Block()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])
        self.named = nn.ModuleDict({"norm": nn.LayerNorm(6)})
        self.shared = nn.Linear(6, 6)
        self.passed = nn.Identity()
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.read = nn.Linear(6, 6, bias=False)
        self.factor, self.kept = 2.0, torch.rand(6)

    def forward(self, x):
        x = self.block(self.body(x), gain=self.factor)["x"] * getattr(self, "more", self.kept)
        for layer in self.layers:
            x = layer(x)
        x = self.shared(self.shared(x).relu()) @ self.read.weight
        return self.head(self.passed(self.named["norm"](x)))


@pytest.fixture(scope="module")
def bundle(new_bundle):
    batch = torch.export.Dim("batch", min=2, max=64)
    return new_bundle(seeded(Model), torch.randn(5, 4), dynamic_shapes=({0: batch},))


def observed(module, x):
    """Return what a training step and an inference give, and leave behind."""
    torch.manual_seed(1)
    module.train()
    result = module(x)
    result.square().sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.eval()
    with torch.no_grad():
        inferred = module(x)
    return {"train": result, "eval": inferred, **gradients, **dict(module.named_buffers())}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert torch.equal(got[name], value), name


# --- changes that calls follow ----------------------------------------------------------------------------


def linear(*sizes, **options):
    torch.manual_seed(2)
    return nn.Linear(*sizes, **options)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(name: str, tensor: str):
    return lambda module: parametrize.register_parametrization(module.get_submodule(name), tensor, Doubled())


def silently(function: Callable[..., object], *args, **kwargs):
    """Call a function that torch has replaced by another, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        function(*args, **kwargs)


def fused(module):
    module.eval()
    module.body[0] = fusion.fuse_linear_bn_eval(module.body[0], module.body[1])
    module.body[1] = nn.Identity()


def scaled_input(module, args):
    return (args[0] * 2,)


def scaled_output(module, args, output):
    return output * 2


def scaled_x(module, args, output):
    return {**output, "x": output["x"] * 2}


def scaled_gradients(module, *gradients):
    return tuple(None if gradient is None else gradient * 3 for gradient in gradients[0])


def overridden_block(module):
    original = module.block.forward
    module.block.forward = lambda x, *, gain: {"x": original(x, gain=gain)["x"].neg(), "kept": x}


class Widened(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return self.second(self.first(x).relu())


class BlockOfUsers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, x, gain):
        return {"x": self.linear(x) * gain, "kept": x}


FOLLOWED = {
    "a head with other outputs by attribute": lambda m: setattr(m, "head", linear(6, 7)),
    "a head by the table": lambda m: m._modules.update(head=linear(6, 7)),
    "an item of a Sequential": lambda m: m.body.__setitem__(2, nn.GELU()),
    "an item of a ModuleList": lambda m: m.layers.__setitem__(0, Widened()),
    "an item of a ModuleDict": lambda m: m.named.__setitem__("norm", nn.Identity()),
    "a submodule of the model's own class": lambda m: setattr(m, "block", BlockOfUsers()),
    "a submodule that is called twice": lambda m: setattr(m, "shared", Widened()),
    "a submodule that passes on what it gets": lambda m: setattr(m, "passed", Widened()),
    "a removed submodule that is not called": lambda m: delattr(m, "unused"),
    "a longer Sequential": lambda m: m.body.append(nn.Sigmoid()),
    "a Sequential with one more in the middle": lambda m: m.body.insert(2, nn.Tanh()),
    "another probability of dropout": lambda m: setattr(m.body[3], "p", 0.7),
    "a replaced parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(3, 6))),
    "a replaced parameter of the model's own class": lambda m: setattr(m.block, "scale", nn.Parameter(torch.ones(6))),
    "a replaced parameter that is read": lambda m: setattr(m.read, "weight", nn.Parameter(torch.ones(6, 6))),
    "a parameter of another shape": lambda m: (
        setattr(m.head, "weight", nn.Parameter(torch.ones(5, 6))),
        setattr(m.head, "bias", nn.Parameter(torch.ones(5))),
    ),
    "a bias that is gone": lambda m: setattr(m.head, "bias", None),
    "a replaced buffer of the model's own class": lambda m: m.block.register_buffer("calls", torch.ones(())),
    "a parametrized weight": parametrized("head", "weight"),
    "a parametrized weight of the model's own class": parametrized("block", "scale"),
    "a parametrized weight that is read": parametrized("read", "weight"),
    "weight norm by hooks on the model's own class": lambda m: silently(nn.utils.weight_norm, m.block, "scale", None),
    "pruning of the model's own class": lambda m: prune.l1_unstructured(m.block, "scale", 0.5),
    "batch norm folded into the layer before": fused,
    "a hook before": lambda m: m.head.register_forward_pre_hook(scaled_input),
    "a hook after the model's own class": lambda m: m.block.register_forward_hook(scaled_x),
    "a hook after the whole": lambda m: m.register_forward_hook(scaled_output),
    "a hook that is taken off again": lambda m: m.head.register_forward_hook(scaled_output).remove(),
    "a backward hook": lambda m: m.head.register_full_backward_hook(scaled_gradients),
    "another forward of the model's own class": overridden_block,
    "frozen weights": lambda m: m.head.requires_grad_(False),
    "assigned state": lambda m: m.load_state_dict(
        {name: torch.full_like(tensor, 0.5) for name, tensor in m.state_dict().items()}, assign=True
    ),
}


# In eager such a module cannot be copied, or its copy has the function of the module that it was copied from.
NO_COPY = ("weight norm by", "pruning", "another forward")
AT_FIRST = ("a head with other outputs by attribute", "a longer Sequential", "a parametrized weight", "a backward hook")


@pytest.mark.parametrize(("name", "is_called"), [*((name, True) for name in FOLLOWED), *((n, False) for n in AT_FIRST)])
def test_change_of_a_loaded_module_does_what_it_does_in_eager_and_its_copy_is_apart(bundle, name, is_called):
    original, loaded = seeded(Model), load(bundle, matmul="torch")
    x = torch.randn(7, 4)
    for module in (original, loaded):
        if is_called:
            observed(module, x)
            module.zero_grad()
            module.train()
        torch.manual_seed(2)
        FOLLOWED[name](module)
    twin = None if name.startswith(NO_COPY) else copy.deepcopy(loaded)
    expected = observed(original, x)
    assert_same(observed(loaded, x), expected)
    if twin is not None:
        memory, own = ({t.data_ptr() for t in each.state_dict().values()} for each in (loaded, twin))
        assert not memory & own
        assert_same(observed(twin, x), expected)


def test_module_that_is_changed_back_runs_its_functional_graph_again(bundle):
    loaded = load(bundle, matmul="torch", target="portable")
    head, x = loaded.head, torch.randn(7, 4)
    before = observed(loaded, x)
    before = {name: None if value is None else value.clone() for name, value in before.items()}
    loaded.head = nn.Identity()
    loaded(x)
    loaded.head = head
    loaded.load_state_dict(seeded(Model).state_dict())
    loaded.zero_grad()
    assert_same(observed(loaded, x), before)
    assert loaded.changes() == []


def test_own_mode_of_a_layer_of_torch_is_followed(bundle):
    original, loaded = seeded(Model), load(bundle, matmul="torch")
    x = torch.randn(7, 4)
    for module in (original, loaded):
        module.train()
        module.body[1].eval()
        module.body[3].eval()
    assert torch.equal(loaded(x), original(x))


def test_part_in_eval_mode_at_export_stays_so_and_is_not_switched_alone(new_bundle):
    model = seeded(Model).train()
    model.block.eval()
    loaded = load(new_bundle(model, torch.randn(5, 4))).train()
    loaded.block.eval()
    assert [loaded.training, loaded.block.training, loaded.block.inner.training] == [True, False, False]
    assert refusal(NotSupported, loaded.block.train).startswith("`block` cannot be switched alone")


@pytest.mark.parametrize("of_all", [False, True])
def test_forward_hook_sees_features_of_the_model(bundle, of_all):
    original, loaded = seeded(Model).eval(), load(bundle).eval()
    seen = {original: [], loaded: []}
    for module, found in seen.items():
        module.block.register_forward_hook(lambda *call: None)
        register = register_module_forward_hook if of_all else module.block.register_forward_hook
        look = functools.partial(lambda found, m, *call: found.append((m.training, *call)), found)
        with register(look, with_kwargs=True), torch.autocast("cpu", enabled=of_all):
            module(torch.ones(3, 4))
    assert any(kwargs == {"gain": 2.0} for _, _, kwargs, _ in seen[loaded])
    torch.testing.assert_close(seen[loaded], seen[original], rtol=0, atol=0)


def test_weights_of_a_tensor_subclass_are_followed_by_a_layer(bundle):
    original, loaded = seeded(Model).eval(), load(bundle).eval()
    x = torch.randn(7, 4)
    for module in (original, loaded):
        weight = module.head.weight.detach()
        module.head.weight = nn.Parameter(TwoTensor(weight, weight * 2))
    with torch.no_grad():
        got, expected = loaded(x), original(x)
    assert type(got) is TwoTensor
    assert torch.equal(got.b, expected.b)


def test_functional_call_takes_weights_of_other_shapes_for_a_layer(bundle):
    original, loaded = seeded(Model).eval(), load(bundle).eval()
    weights = {"head.weight": torch.ones(5, 6), "head.bias": torch.ones(5)}
    x = torch.randn(7, 4)
    results = [torch.func.functional_call(module, weights, (x,)) for module in (original, loaded)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(original(x), loaded(x))


# --- changes that are refused -----------------------------------------------------------------------------

WRAP = (
    "Hold the loaded module and new layers in a module of your own, and export that (`aotexport.export(wrapper, ...)`) "
    "where one bundle shall hold both"
)
AGAIN = "Change the model, and export it again"
FIXED = "what the model's code read of it was fixed at export. Set it before the export"


REFUSED_AT_ONCE = {
    "an added submodule": (
        lambda m: setattr(m, "extra", linear(2, 2)),
        f"`extra` was not there at export, so no call would use the added submodule. {WRAP}",
    ),
    "an attribute": (
        lambda m: setattr(m, "factor", 3.0),
        f"no call looks at the attribute `factor` of the loaded module: {FIXED}",
    ),
    "an attribute that the code asked for in vain": (
        lambda m: setattr(m, "more", torch.ones(6)),
        f"no call looks at the attribute `more` of the loaded module: {FIXED}",
    ),
    "a tensor that is no buffer": (
        lambda m: setattr(m, "kept", torch.ones(6)),
        f"no call looks at the attribute `kept` of the loaded module: {FIXED}",
    ),
    "another class of a submodule": (
        lambda m: setattr(m.block, "__class__", nn.Linear),
        "`block` cannot become a `Linear`, only an object of a subclass of `LoadedSubmodule`",
    ),
    "a mode of a submodule of the model's own class": (
        lambda m: m.block.eval(),
        "`block` cannot be switched alone: a bundle holds the programs of the whole module. Switch it before the "
        "export, which keeps such a mixture, or export the program `eval-joint`",
    ),
    "a call of a submodule of the model's own class": (
        lambda m: m.block(torch.ones(2, 6)),
        "`block` cannot be called by itself: a bundle holds the program of the whole module, and the class of this "
        "submodule is the model's own. Register a forward hook on it to see what it takes and returns, or export it "
        "alone",
    ),
    "replicas": (
        lambda m: m._replicate_for_data_parallel(),
        "torch.nn.DataParallel runs copies of a module's attributes, which a loaded bundle does not read. Use "
        "torch.nn.parallel.DistributedDataParallel, one process per device",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE)
def test_change_that_calls_cannot_follow_is_refused_at_once(bundle, change, message):
    loaded = load(bundle).train()
    assert refusal(NotSupported, change, loaded) == message
    assert loaded.changes() == []


REFUSED_AT_A_CALL = {
    "a removed head": (
        lambda m: delattr(m, "head"),
        "`head` was removed, and program `train` calls it. Put a module in its place (`torch.nn.Identity()` passes on "
        "what it gets)",
    ),
    "a parameter of another shape in the model's own class": (
        lambda m: setattr(m.block, "scale", nn.Parameter(torch.ones(1))),
        "the program is not right for the module's tensors as they are now. `block.scale`: expected float32[6], got "
        "float32[1]. Replace the whole submodule by one of your own, or change the model and export it again",
    ),
    "a parameter of a layer that does not fit the others": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(5, 6))),
        "`head.weight` is float32[5, 6] now, and was float32[3, 6] when the bundle was loaded: the layer cannot "
        "compute with it (The expanded size of the tensor (5) must match the existing size (3) at non-singleton "
        "dimension 1.  Target sizes: [7, 5].  Tensor sizes: [3]). Give it the former dtype and shape, set the layer's "
        "other tensors too, or replace the whole layer",
    ),
    "a parameter of another shape that is read": (
        lambda m: setattr(m.read, "weight", nn.Parameter(torch.ones(6, 8))),
        "`read` has a `weight` of another dtype, shape or class, and no call can follow: what calls do with it cannot "
        "be told apart from the rest (the model's code uses it otherwise than by calling it). "
        f"{AGAIN}",
    ),
    "a submodule that is read": (
        lambda m: setattr(m, "read", linear(6, 6)),
        "`read` was replaced by a `Linear`, and no call can follow: what calls do with it cannot be told apart from "
        f"the rest (the model's code uses it otherwise than by calling it). {AGAIN}",
    ),
    "an added parameter": (
        lambda m: m.block.register_parameter("extra", nn.Parameter(torch.ones(2))),
        f"`block.extra` was not there at export, so no call would use it. {WRAP}",
    ),
    "an attribute of a layer of torch, which no hook reads": (
        lambda m: setattr(m.head, "factor", 3.0),
        f"no call looks at the attribute `factor` of `head`: {FIXED}",
    ),
    "a result of another structure": (
        lambda m: m.layers[0].register_forward_hook(lambda module, args, output: [output]),
        "`layers.0` has hooks, and now returns what the rest of the program is not right for. Return what the original "
        "did, or change the model and export it again:\n  - `result`: expected a tensor, got list",
    ),
    "other constants": (
        lambda m: m.block.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {"gain": 3.0}), with_kwargs=True
        ),
        "`block` got other arguments by a hook than it takes in this program, which is not right for them:\n"
        "  - `kwargs['gain']`: expected 2.0, as at capture, got 3.0",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED_AT_A_CALL.values(), ids=REFUSED_AT_A_CALL)
def test_change_that_calls_cannot_follow_is_refused_by_the_next(bundle, change, message):
    loaded = load(bundle).train()
    x = torch.randn(7, 4)
    loaded(x)
    change(loaded)
    assert refusal((NotSupported, TypeError), loaded, x) == message


def exported(model, x, path):
    """Return the loaded bundle of a model in eval mode."""
    aotexport.export(model.eval(), (x,), output=path, programs="infer", verify=False)
    return load(path, matmul="torch").eval()


def test_items_of_a_whole_sequential_are_followed_and_its_length_is_fixed(tmp_path):
    original, x = nn.Sequential(OrderedDict(a=linear(4, 6), act=nn.ReLU(), b=linear(6, 3))), torch.ones(5, 4)
    loaded = exported(original, x, tmp_path / "bundle")
    assert [type(item).__name__ for item in loaded] == ["Linear", "ReLU", "Linear"]
    assert torch.equal(loaded[:2](x), original[:2](x))
    for module in (original, loaded):
        module[-1], module.act = linear(6, 7), nn.Tanh()
        module[0].register_forward_hook(scaled_output)
    with torch.no_grad():
        assert torch.equal(loaded(x), original(x))
    with pytest.raises(NotSupported, match="`3` was not there at export, so no call would use the added submodule"):
        loaded.append(nn.Tanh())
    act = loaded._modules.pop("act")
    with pytest.raises(NotSupported, match="`act` was removed, and program `infer` calls it"):
        loaded(x)
    loaded.add_module("act", act)
    with pytest.raises(NotSupported, match="its submodules in another order"):
        loaded(x)


def test_items_of_a_sequential_run_in_their_order(tmp_path):
    layers = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), act=nn.ReLU(), b=nn.Linear(4, 4)))
    model, x = models.module(lambda self, x: self.inner(x), inner=layers), torch.randn(2, 4)
    loaded = exported(model, x, tmp_path / "bundle")
    for each in (model.inner, loaded.inner):
        each.add_module("act", each._modules.pop("act"))
    assert torch.equal(loaded(x), model(x))


# --- loaded bundles in other modules ------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A loaded bundle without its head, and a head of its own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.base.head = nn.Identity()
        self.head = linear(6, 10)

    def forward(self, x):
        return self.head(self.base(x)).log_softmax(dim=1)


def export_again(module, path):
    batch = torch.export.Dim("batch", min=2, max=64)
    return aotexport.export(module, (torch.randn(5, 4),), output=path, dynamic_shapes=({0: batch},), verify=False)


def test_wrapper_of_a_loaded_bundle_trains_and_is_exported_whole(bundle, tmp_path):
    original, wrapper = Wrapper(seeded(Model)), Wrapper(load(bundle, matmul="torch"))
    assert_same(wrapper.state_dict(), original.state_dict())
    x = torch.randn(7, 4)
    assert_same(observed(wrapper, x), observed(original, x))
    export_again(wrapper.train(), tmp_path / "whole")
    again = load(tmp_path / "whole", matmul="torch")
    for module in (again, original):
        module.zero_grad()
    assert_same(observed(again, x), observed(original, x))
    again.base.block.inner, original.base.block.inner = Widened(), Widened()
    again.base.body[2], original.base.body[2] = nn.GELU(), nn.GELU()
    again.head = original.head = linear(6, 2)
    assert_same(observed(again, x), observed(original, x))


# --- saving -----------------------------------------------------------------------------------------------

SAVE = (
    "and `save` writes the programs that were exported, with other weights. Export the loaded module as it is now "
    "(`aotexport.export(module, ...)`), which captures it whole"
)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a head with other outputs by attribute", "`head` was replaced by a `Linear`"),
        ("a longer Sequential", "`body` has other submodules"),
        ("another probability of dropout", "`body.3` has another `p`"),
    ],
)
def test_saving_a_module_that_is_more_than_weights_is_refused(bundle, tmp_path, name, how):
    loaded = load(bundle)
    FOLLOWED[name](loaded)
    assert refusal(NotSupported, save, loaded, tmp_path / "saved") == f"{how}, {SAVE}"
    assert not (tmp_path / "saved").exists()


def test_saving_a_module_with_hooks_writes_its_weights(bundle, tmp_path):
    loaded = load(bundle)
    loaded.head.register_forward_hook(scaled_output)
    save(loaded, tmp_path / "saved")
    assert_same(observed(load(tmp_path / "saved"), torch.ones(3, 4)), observed(seeded(Model), torch.ones(3, 4)))


# --- shared and tied --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.mix = nn.Linear(6, 6)
        self.alias = self.mix
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.alias(self.mix(self.embed(ids))))


def test_shared_modules_and_tied_weights_are_replaced_by_all_their_names(new_bundle):
    torch.manual_seed(0)
    original, ids = Tied(), torch.arange(4)
    loaded = load(new_bundle(original, ids), matmul="torch")
    for model in (original, loaded):
        assert model.mix is model.alias
        model.mix = model.alias = linear(6, 6)
        model.head = linear(6, 9)
    assert_same(observed(loaded, ids), observed(original, ids))
    loaded.alias = linear(6, 6)
    with pytest.raises(NotSupported, match=r"`alias` and `mix` are one module in the programs, and no longer are\."):
        loaded(ids)


class Positions(nn.Embedding):
    """Takes and returns sizes, as the position embeddings of Marian do."""

    def forward(self, shape):
        return super().forward(torch.arange(shape[1])), (shape[1], shape[1] + 1)


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.positions = Positions(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        places, (length, longer) = self.positions(x.shape)
        return self.head(x + places) * length / longer / x.shape[0]


class WidenedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, shape):
        return self.scale * torch.ones(shape[1], 6), (shape[1] + 2, shape[1])


def doubled_longer(module, args, output):
    return output[0], (output[1][0], output[1][1] * 2)


SIZES = {
    "a submodule that takes and returns sizes": lambda m: setattr(m, "positions", WidenedPositions()),
    "a hook on sizes": lambda m: m.positions.register_forward_hook(doubled_longer),
}


@pytest.fixture(scope="module")
def placed_bundle(new_bundle):
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1, max=16)
    shapes = ({0: batch, 1: length},)
    return new_bundle(seeded(Placed), torch.randn(3, 5, 6), dynamic_shapes=shapes)


@pytest.mark.parametrize("change", SIZES.values(), ids=SIZES)
def test_change_of_a_module_of_dynamic_sizes_does_what_it_does_in_eager(placed_bundle, change):
    original, loaded = seeded(Placed), load(placed_bundle, matmul="torch")
    change(original)
    change(loaded)
    x = torch.randn(2, 7, 6)
    assert_same(observed(loaded, x), observed(original, x))


def test_size_that_is_first_read_in_a_switched_norm_is_that_of_the_call(placed_bundle):
    original, loaded = seeded(Placed), load(placed_bundle)
    for module in (original, loaded):
        module.train()
        module.norm.eval().requires_grad_(False)
    for x in (torch.randn(2, 7, 6), torch.randn(5, 3, 6)):
        found = []
        for module in (original, loaded):
            result = module(x)
            result.square().sum().backward()
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
            found.append({"result": result, **gradients, **dict(module.named_buffers())})
        assert_same(*reversed(found))


def test_bundle_without_calls_of_submodules_refuses_other_modules(new_bundle, caplog):
    loaded = load(new_bundle(seeded(Model), torch.randn(5, 4), strip=True)).eval()
    with register_module_forward_hook(lambda m, args, output: None):
        loaded(torch.randn(5, 4))
    told = "hooks of all modules do not see the calls of `block`, `block.inner`, `body` and 10 more in program infer"
    assert caplog.messages == [told]
    loaded.head = nn.Identity()
    assert refusal(NotSupported, loaded, torch.randn(5, 4)) == (
        "`head` was replaced by a `Identity`, and program `infer` does not say which of its nodes are calls of it: it "
        "was exported with `--strip`, by an older exporter, or not by a direct trace. Change the model, and export it "
        "again"
    )


class TenTimes(nn.Module):
    def forward(self, x):
        return x * 10


def passing(function, join):
    """Return a model with a part that returns what it gets, by an operator that has nothing to do."""
    part = function if isinstance(function, nn.Module) else models.module(lambda self, x: function(x))
    return models.module(lambda self, x: join(self.linear(self.part(x)), x), part=part, linear=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("function", "join", "is_followed"),
    [
        (torch.Tensor.float, lambda y, x: y + x, False),
        (lambda x: x.contiguous(), lambda y, x: y + x, True),
        (torch.Tensor.float, lambda y, x: y, True),
        (nn.AlphaDropout(0.5), lambda y, x: y + x, False),
    ],
    ids=["residual", "residual of a copy", "chain", "dropout"],
)
def test_module_that_returned_what_it_got_is_replaced_as_in_eager_or_refused(function, join, is_followed, tmp_path):
    model, x = passing(function, join), torch.randn(2, 4)
    loaded = exported(model, x, tmp_path / "bundle")
    model.part = loaded.part = TenTimes()
    if is_followed:
        assert torch.equal(loaded(x), model(x))
        return
    with pytest.raises(NotSupported, match="`part` was replaced by a `TenTimes`"):
        loaded(x)


def test_parametrization_is_computed_once_a_call(tmp_path):
    model, x = models.module(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(4, 4))), torch.randn(3, 4)
    aotexport.export(model, (x,), output=tmp_path / "bundle", verify=False)
    found = []
    for each in (model, load(tmp_path / "bundle")):
        torch.manual_seed(0)
        parametrizations.spectral_norm(each.train(), "weight", n_power_iterations=1)
        with torch.no_grad():
            found.append((each(x), each(x), torch.rand(1), *each.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
