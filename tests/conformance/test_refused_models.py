"""Models that a bundle cannot hold are refused by name, and first calls that prepare a model."""

import pytest
import torch
from torch import nn

import aotexport
from tests.models import module


def draws_from_its_own_generator(x):
    return x * torch.rand(3, generator=torch.Generator().manual_seed(4))


def forks_the_random_state(x):
    with torch.random.fork_rng():
        return x * torch.rand(3)


class ReturnsItself(nn.Module):
    def forward(self, x):
        return x, self


def converting():
    return module(lambda self, x: self.layer.double()(x.double()), layer=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (draws_from_its_own_generator, r"draws from a `torch\.Generator` of the model's own"),
        (forks_the_random_state, r"the model calls `torch\.random\.fork_rng`, which a bundle cannot hold"),
        (ReturnsItself(), r"output `output\[1\]` is a `.*ReturnsItself`, which a bundle cannot hold"),
        (converting(), r"the model calls `Module\.to` \(or the like\), which changes `weight`"),
        (nn.Linear(3, 3, device="meta"), "`weight` is on the meta device, and has no values"),
    ],
)
def test_what_a_bundle_cannot_hold_is_refused_by_name(tmp_path, target, message):
    with pytest.raises(aotexport.ExportFailed, match=message):
        aotexport.export(target, (torch.ones(3),), output=tmp_path / "bundle")


def test_power_of_a_size_is_refused_with_the_line_and_a_way_out_without_a_comparison(tmp_path):
    rows = ({0: torch.export.Dim("rows", min=1, max=16)},)
    with pytest.raises(aotexport.ExportFailed, match=r"a size as exponent of an integer .*`2\.0 \*\* n`") as caught:
        aotexport.export(
            lambda x: x * 2 ** x.shape[0],
            (torch.ones(3),),
            output=tmp_path / "bundle",
            dynamic_shapes=rows,
            verify=False,
        )
    assert str(caught.value).startswith("tests/conformance/test_refused_models.py:")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused_by_name(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(aotexport.ExportFailed, match="`1` is TorchScript, whose code a trace does not see"):
        aotexport.export(net, (torch.ones(3),), output=tmp_path / "bundle")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_packed_for_kernels_are_refused_with_a_way_out(tmp_path):
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(aotexport.ExportFailed, match=r"`0._packed_params._packed_params` holds .* by torchao"):
        aotexport.export(net, (torch.ones(3),), output=tmp_path / "bundle")


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        self.layer.register_forward_hook(lambda module, args, output: output * 2)
        return self.layer(x)


def test_call_that_registers_hooks_is_refused(tmp_path):
    with pytest.raises(aotexport.ExportFailed, match="the call registers hooks on modules"):
        aotexport.export(Hooked(), (torch.ones(2, 3),), output=tmp_path / "bundle")


class PreparedOnFirstCall(nn.Module):
    """Registers a hook at its first call, as model libraries do to record hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.ready = nn.Linear(3, 3), False

    def forward(self, x):
        if not self.ready:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.ready = True
        return self.layer(x)


def test_model_that_is_prepared_by_its_first_call_is_exported_as_after_it(load):
    net = PreparedOnFirstCall()
    module, x = load(net, torch.ones(2, 3), verify=True), torch.randn(2, 3)
    torch.testing.assert_close(module(x), net(x))
    assert len(net.layer._forward_hooks) == 1
