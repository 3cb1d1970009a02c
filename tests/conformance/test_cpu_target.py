"""The `cpu` target: libraries give what the graphs give, and calls that they are not for run the graphs."""

import json
import logging
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.lower.targets import LEVELS, own_level
from aotexport_runtime import BundleInvalid, NotSupported
from aotexport_runtime.commands.results import rounding
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.module.describe import describe
from tests.cases import all_cases
from tests.interpreter.models import bfloat16_extrema, pools
from tests.refusals import refusal

LAID_OUT_OTHERWISE = "normalised_channels_that_are_last"
NO_CALLS = "ran nothing of program"
"""Of calls that libraries refuse, such as those with inputs that share memory with a written one."""
OWN = own_level()
# Compiling takes a minute; `test_explain.py` compares a library with its recorded calls in every run.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(OWN is None, reason="this processor has no level of the target")]


class Words(nn.Module):
    """Looks up, mutates a buffer, normalises, draws, returns several results; its batch is dynamic."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, words, scale):
        hidden = self.norm(nn.functional.gelu(self.table(words.abs() % 20) + self.table(words)) * scale)
        self.seen.add_(hidden.detach().sum((0, 1)))
        logits = self.out(self.dropout(hidden.transpose(0, 1)))
        return logits.square().mean(), logits


def example(batch=4):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(20, (batch, 5), generator=generator), torch.rand(batch, 5, 1, generator=generator)


@pytest.fixture(scope="module")
def words(new_bundle):
    """Return the directory of a bundle with the `cpu` target; not to be written to."""
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    return new_bundle(
        Words(), *example(), programs=("train",), dynamic_shapes=({0: batch}, {0: batch}), targets=("cpu",)
    )


@pytest.fixture
def pair(words):
    """Return the bundle, loaded for the `cpu` target and for the portable one."""
    return aotexport_runtime.load(words, target="cpu", trust="native"), aotexport_runtime.load(words, target="portable")


@pytest.fixture
def library_calls(monkeypatch):
    """Return a list that grows with the name of each library that is called."""
    calls = []
    original = Libraries._function

    def watched(self, library, subgraph, fallback):
        function = original(self, library, subgraph, fallback)

        def call(args, symbols):
            calls.append(library.file)
            return function(args, symbols)

        return call

    monkeypatch.setattr(Libraries, "_function", watched)
    return calls


def step(module, args, loss=lambda outputs: outputs[0]):
    """Run a training step; return everything that can be seen of it."""
    torch.manual_seed(1)
    outputs = module(*args)
    loss(outputs).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return [*outputs, *gradients.values(), module.seen, torch.rand(1)]


def assert_equal(got, expected):
    assert [value is None for value in got] == [value is None for value in expected]
    for one, other in zip(got, expected, strict=True):
        if one is not None:
            assert one.stride() == other.stride()
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("batch", [2, 4, 64])
def test_training_step_by_libraries_equals_the_portable_one(pair, library_calls, batch):
    compiled, portable = pair
    assert_equal(step(compiled, example(batch)), step(portable, example(batch)))
    assert library_calls == ["train.forward.so", "train.backward.so"]


def test_self_test_compares_the_backward_from_the_loss_with_the_graph(words, library_calls):
    results = run_vectors(words, target="cpu", trust="native")
    assert [result.vector.partition(", ")[2] for result in results[:2]] == ["", "backward from the loss"]
    assert all(result.agrees for result in results)
    assert "train.backward.so" in library_calls


def of_everything(outputs):
    return outputs[0] + outputs[1].sum()


@pytest.mark.parametrize(
    ("batch", "frozen", "loss", "deterministic", "libraries"),
    [
        (1, False, None, False, []),
        (4, False, lambda outputs: outputs[1].square().sum(), False, ["train.forward.so"]),
        (4, False, of_everything, False, ["train.forward.so"]),
        (4, True, None, False, []),
        (4, False, None, True, []),
    ],
    ids=["a size that the compiler took for a constant", "no loss", "more than the loss", "frozen", "deterministic"],
)
def test_call_that_libraries_are_not_for_runs_the_graph(
    pair, library_calls, batch, frozen, loss, deterministic, libraries
):
    torch.use_deterministic_algorithms(deterministic)
    try:
        for module in pair:
            module.get_parameter("table.weight").requires_grad_(not frozen)
        steps = [step(module, example(batch), *([loss] if loss else [])) for module in pair]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(*steps)
    assert library_calls == libraries


@pytest.mark.parametrize("index", [20, -1])
def test_index_out_of_bounds_raises_eagers_error(pair, index):
    words, scale = example()
    words[1, 2] = index
    assert refusal(IndexError, pair[0], words, scale) == "index out of range in self"


def test_bundle_without_trust_runs_its_graphs_and_says_so(words, library_calls, caplog):
    with caplog.at_level(logging.INFO, "aotexport_runtime"):
        module = aotexport_runtime.load(words)
        step(module, example())
    name = f"cpu-{OWN.name}"
    reason = "it holds native code, and was loaded without trust='native'"
    assert caplog.messages == [
        f"target auto; not {name}: {reason}",
        "program train runs its forward graph: no matmul is large enough to gain by oneDNN",
        "program train runs forward and backward by autograd",
    ]
    assert library_calls == []
    said = refusal(NotSupported, aotexport_runtime.load, words, target="cpu")
    assert said == f"target `cpu` cannot run here: the bundle has portable, {name}; not {name}: {reason}"


def test_changed_library_is_refused_even_where_digests_are_not_compared(words, tmp_path):
    shutil.copytree(words, tmp_path / "copy")
    library = tmp_path / f"copy/targets/cpu-{OWN.name}/train.forward.so"
    library.write_bytes(library.read_bytes()[:-1] + b"\1")
    module = aotexport_runtime.load(library.parents[2], target="cpu", trust="native", check_digests=False)
    with pytest.raises(BundleInvalid, match="its SHA-256 differs from the manifest's"):
        module(*example())


def test_library_for_another_torch_runs_portable(words, library_calls, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with caplog.at_level(logging.INFO, "aotexport_runtime"):
        step(aotexport_runtime.load(words, trust="native"), example())
    assert caplog.messages[0].endswith(" and this is torch 2.99.0")
    assert library_calls == []


def test_fresh_process_runs_the_libraries_without_torchs_compiler(words):
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import aotexport_runtime\n"
        f"module = aotexport_runtime.load({str(words)!r}, target='cpu', trust='native')\n"
        "module(torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, 1))[0].backward()\n"
        "compiler = ('torch._inductor', 'torch._dynamo', 'torch._functorch', 'torch.export', 'sympy')\n"
        "print([name for name in set(sys.modules) - before if name.startswith(compiler)])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.stdout.strip(), process.stderr) == ("[]", "")


def test_programs_that_cannot_be_compiled_are_refused_with_a_reason(tmp_path):
    def call(x):
        torch.rand(3)
        return x * 2

    report = aotexport.export(
        call, (torch.ones(3),), output=tmp_path / "b", targets=("cpu:v3,v4",), programs=("infer",)
    )
    assert [entry.targets for entry in report.manifest.programs] == [("portable",)]
    bundle = aotexport_runtime.open_bundle(tmp_path / "b")
    assert bundle.target_names == ("cpu-x86_64-v3", "cpu-x86_64-v4")
    reason = "`aten::rand.default` only advances the random state, which a compiler leaves out"
    assert [refusal.reason for name in bundle.target_names for refusal in bundle.target(name).refusals] == [reason] * 2
    assert f"not for cpu-x86_64-v3: {reason}" in describe(bundle)


@pytest.mark.parametrize("make", [pools, bfloat16_extrema])
def test_operators_that_the_compiler_gets_wrong_have_libraries_that_agree(tmp_path, make):
    torch.manual_seed(0)
    model, args, _ = make()
    report = aotexport.export(model, args, output=tmp_path / "b", targets=("cpu",), programs="train")
    assert [entry.targets for entry in report.manifest.programs] == [("portable", f"cpu-{OWN.name}")]
    assert {c.agrees for c in report.comparisons if c.target == f"cpu-{OWN.name}"} == {True}


@pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
def test_library_runs_with_the_matmuls_that_it_chose_and_no_others(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 160), nn.Dropout(), nn.Linear(160, 128, bias=False)), torch.randn(128, 128)
    path = tmp_path / "layers"
    aotexport.export(model, (x,), output=path, targets=("portable", "cpu"), verify=False, programs=("train",))

    def results(module):
        torch.manual_seed(1)
        module.zero_grad()
        module(x).square().mean().backward()
        return [*(parameter.grad.clone() for parameter in module.parameters()), torch.rand(1)]

    module = aotexport_runtime.load(path, target="cpu", trust="native", matmul="onednn").train()
    first, later, expected = results(module), results(module), results(model)
    torch.testing.assert_close(later, first, rtol=0, atol=0)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    # The choice is the library's, and so there is one for the process.
    other = aotexport_runtime.load(path, trust="native", matmul="torch").train()
    torch.testing.assert_close(results(other), expected, rtol=1e-5, atol=1e-6)
    asked = aotexport_runtime.load(path, target="cpu", trust="native", matmul="torch").train()
    with pytest.raises(aotexport_runtime.NotSupported, match="loaded with matmul=`onednn`; for matmul=`torch`"):
        asked(x)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore")
def test_every_case_by_libraries_equals_eager(tmp_path, case):
    callable_, args, kwargs = case.make()
    levels = ",".join(name for name, level in LEVELS.items() if level.vector_nbits <= OWN.vector_nbits)
    report = aotexport.export(
        callable_, args, kwargs, output=tmp_path / "b", targets=(f"cpu:{levels}",), **case.options
    )
    bundle = aotexport_runtime.open_bundle(report.path)
    targets = [msgspec.to_builtins(bundle.target(name)) for name in bundle.target_names]
    reasons = [refusal["reason"] for target in targets for refusal in target.get("refusals", ())]
    wrong = [reason for reason in reasons if "disagreed" in reason and NO_CALLS not in reason]
    # The compiler lays results of batch norm out as its input, where eager's rows are dense.
    expected = [case.name == LAID_OUT_OTHERWISE and "strides [20, 4, 1], got float32" in reason for reason in wrong]
    assert all(expected), json.dumps(targets)
    far = [
        comparison
        for comparison in report.comparisons
        if comparison.target.startswith("cpu")
        and not comparison.error <= 2e-5
        and rounding(bundle, comparison.program) <= 1e-4
    ]
    assert far == []
