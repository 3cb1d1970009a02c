"""What a caller is told of the engines that run a bundle; and a target that was asked for runs, or says why not."""

import json
import logging
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.lower.targets import own_level
from aotexport_runtime.cli.app import main
from tests.hostile.crafted import Crafted

OWN = own_level()
GOLDENS = Path(__file__).parents[1] / "golden/v1.0"
KERNELS = GOLDENS / "kernels/bundle"
NO_KERNELS = "the bundle has no kernels. Export it with `--target cuda`"
LOSS_ALONE = "the library is for a backward pass from the loss alone"

has_level = pytest.mark.skipif(OWN is None, reason="this processor has no level of the target `cpu`")
CPU = "" if OWN is None else OWN.target


class Net(nn.Module):
    """Returns a loss and more, of a dynamic batch of which it looks up a row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x - x.gather(0, x.argmin(0, keepdim=True))).tanh()
        return y.square().mean(), y


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """Return the directory of a bundle with libraries; not to be written to."""
    path = tmp_path_factory.mktemp("bundles") / "net"
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    options = {"targets": ("cpu",), "dynamic_shapes": ({0: batch},), "programs": "train", "verify": False}
    aotexport.export(Net(), (torch.randn(8, 4),), output=path, **options)
    return path


def program(module, name="train"):
    return next(each for each in module.explain().programs if each.program == name)


def runs(module, name="train"):
    return [(run.passes, run.engine, run.because) for run in program(module, name).has_run]


@pytest.fixture
def selftest(capsys):
    """Return what runs the command, and gives its exit code, what it printed, and its errors."""

    def run(*arguments):
        code = main(["selftest", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@has_level
def test_passes_that_ran_are_told_with_the_reason_for_a_slower_engine(net, caplog):
    caplog.set_level(logging.INFO, "aotexport_runtime")
    module = aotexport_runtime.load(net, target="cpu", trust="native").train()
    caplog.clear()

    def lines(call):
        caplog.clear()
        call()
        return [message.removeprefix("program train runs ") for message in caplog.messages]

    first = [f"forward by {CPU}", f"backward by {CPU}"]
    assert lines(lambda: module(torch.ones(8, 4))[0].backward()) == first
    assert lines(lambda: module(torch.ones(8, 4))[0].backward()) == []
    assert lines(lambda: sum(y.sum() for y in module(torch.ones(8, 4))).backward()) == [
        f"backward by portable ({LOSS_ALONE})"
    ]
    assert lines(lambda: module(torch.ones(1, 4))) == ["forward by portable (libraries are for 2 <= batch)"]
    assert lines(lambda: torch.func.functional_call(module, {}, (torch.ones(8, 4).expand(8, 4),))) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert lines(lambda: module(torch.ones(8, 4))) == [
            "forward and backward by autograd (autocast around the call)"
        ]
    assert runs(module) == [
        ("forward", CPU, ""),
        ("backward", CPU, ""),
        ("backward", "portable", LOSS_ALONE),
        ("forward", "portable", "libraries are for 2 <= batch"),
        ("forward and backward", "autograd", "autocast around the call"),
    ]


def test_text_has_a_few_lines_per_program(tiny):
    module = aotexport_runtime.load(tiny, target="portable")
    module.train()(torch.ones(5, 4))["best"].sum().backward()
    assert str(module.explain()) == (
        "target portable\n"
        "program train on cpu: portable (functional graph), else autograd (forward graph)\n"
        f"  not cuda: {NO_KERNELS}\n"
        "  has run: forward and backward by portable\n"
        "program infer on cpu: portable (functional graph), else autograd (forward graph)\n"
        f"  not cuda: {NO_KERNELS}\n"
        "  has run: nothing"
    )


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_trusted_bundle_with_kernels_says_why_they_do_not_run(caplog):
    caplog.set_level(logging.INFO, "aotexport_runtime")
    found = program(aotexport_runtime.load(KERNELS, trust="native"))
    reason = "kernels run on NVIDIA GPUs, and the bundle is on the devices of the capture"
    assert found.why_not["cuda"] == reason
    assert f"program train runs without its kernels: {reason}" in caplog.messages


@has_level
def test_self_test_names_what_ran(net, selftest):
    code, output, _ = selftest(net, "--target", "cpu", "--trust", "native")
    assert code == 0
    (train,) = output.splitlines()
    assert train.startswith(f"{net}: train, libraries (cpu): ok, outputs and gradients of 6 calls, relative error ")
    small = "forward by portable (libraries are for 2 <= batch)"
    assert f", forward and backward by {CPU}; backward by portable ({LOSS_ALONE}); {small}" in train


@has_level
def test_libraries_ask_no_index_for_its_bounds_in_their_loops(net):
    for library in net.rglob("*.so"):
        assert b"index out of bounds" not in library.read_bytes()


@has_level
def test_self_test_fails_where_the_target_runs_nothing_of_a_program(net, tmp_path, selftest):
    crafted = Crafted(net, tmp_path / "b")
    crafted.write(f"targets/{CPU}/target.json", _guarded(net))
    code, output, _ = selftest(crafted.seal(), "--target", "cpu", "--trust", "native")
    assert code == 1
    assert (
        "  train/example, libraries (cpu): raised target `cpu` ran nothing of program `train`: forward by portable "
        "(libraries are for 65 <= batch); backward by portable\n"
    ) in output
    code, output, _ = selftest(tmp_path / "b", "--trust", "native")
    reason = f"train, libraries ({CPU}): not run: no recorded call meets its guards: forward by portable"
    assert (code, reason in output) == (0, True)


def _guarded(bundle):
    """Return the record of the target with libraries for sizes that no call has."""
    record = json.loads((bundle / f"targets/{CPU}/target.json").read_text())
    (program,) = record["programs"]
    program["guards"] = json.loads(json.dumps(program["guards"]).replace("[2, ", "[65, "))
    return json.dumps(record).encode()


@has_level
def test_self_test_runs_every_graph_of_the_bundle(net, selftest):
    code, output, _ = selftest(net)
    heads = [line.removeprefix(f"{net}: ").partition(", relative error")[0] for line in output.splitlines()]
    assert (code, heads) == (
        0,
        [
            "train, forward graph (autograd): ok, outputs and gradients of 3 calls",
            "train, joint graph (portable): ok, outputs and gradients of 3 calls",
            f"train, libraries ({CPU}): not run: it holds native code, and was loaded without trust='native'",
        ],
    )


def test_self_test_names_the_joint_graph_whose_gradient_is_wrong(tmp_path, selftest):
    crafted = Crafted(GOLDENS / "linear/bundle", tmp_path / "b")
    (summed,) = (node for node in crafted.document("joint")["nodes"] if node["op"] == "aten::sum.dim_IntList")
    summed["args"][0] = "relu"
    code, output, _ = selftest(crafted.seal())
    joint, *wrong = [line for line in output.splitlines() if "joint graph" in line]
    assert (code, joint.partition(", relative")[0]) == (
        1,
        f"{tmp_path / 'b'}: train, joint graph (portable): FAILED, outputs and gradients of 2 calls",
    )
    assert {line.partition(": relative")[0] for line in wrong} == {
        f"  train/{name}, joint graph (portable): call {number}: gradient of 0.bias"
        for name in ("example", "random")
        for number in (0, 1)
    }
    assert output.count(": ok, ") == 3


def test_self_test_runs_onnx_models_and_names_one_that_is_wrong(tmp_path, selftest):
    code, output, _ = selftest(GOLDENS / "onnx_model/bundle")
    line = output.splitlines()[-1]
    assert (code, "infer, ONNX model (onnx): ok, outputs and state of 2 calls, relative error " in line) == (0, True)
    crafted = Crafted(GOLDENS / "onnx_model/bundle", tmp_path / "b")
    model = onnx.load(crafted.root / "model.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.output[0] == "output").op_type = "Add"
    crafted.write("model.onnx", model.SerializeToString())
    code, output, _ = selftest(crafted.seal())
    assert code == 1
    assert "infer, ONNX model (onnx): FAILED, outputs and state of 2 calls" in output
    assert "  infer/example, ONNX model (onnx): call 0: output: relative error " in output
    assert "infer, forward graph (autograd): ok, " in output
