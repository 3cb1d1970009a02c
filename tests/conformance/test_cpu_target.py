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
from torch._higher_order_ops import scan

import aotexport
import aotexport_runtime
from aotexport.lower.targets import LEVELS, own_level
from aotexport_runtime import BundleInvalid, NotSupported
from aotexport_runtime.commands.results import rounding
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.engines.cpu.engine import Libraries, table_of
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.module.describe import describe
from tests.cases import all_cases
from tests.conformance.test_not_a_number import with_nan
from tests.interpreter.models import bfloat16_extrema, pools

OWN = own_level()
# Compiling takes a minute; `test_explain.py` compares a library with its recorded calls in every run.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OWN is None, reason="this processor has no level of the target"),
]


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
        hidden = self.norm(nn.functional.gelu(self.table(words)) * scale)
        self.seen.add_(hidden.detach().sum((0, 1)))
        logits = self.out(self.dropout(hidden.transpose(0, 1)))
        return logits.square().mean(), logits


def example(batch=4):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(20, (batch, 5), generator=generator), torch.rand(batch, 5, 1, generator=generator)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return the directory of a bundle with the `cpu` target; not to be written to."""
    path = tmp_path_factory.mktemp("bundles") / "words"
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    aotexport.export(
        Words(),
        example(),
        output=path,
        programs=("train",),
        dynamic_shapes=({0: batch}, {0: batch}),
        targets=("cpu",),
        verify=False,
    )
    return path


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


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """Return a function that loops over rows, and the directory of its bundle; not to be written to."""

    def cumulated(rows):
        return scan(lambda carried, row: (carried + row.sin(), carried * row), torch.zeros(3), rows)

    path = tmp_path_factory.mktemp("bundles") / "loop"
    rows = torch.export.Dim("rows", min=2)
    options = {"targets": ("cpu",), "programs": ("infer",), "verify": False}
    aotexport.export(cumulated, (torch.rand(4, 3),), output=path, dynamic_shapes=({0: rows},), **options)
    return cumulated, path


@pytest.mark.slow
def test_loop_over_a_dynamic_size_runs_by_libraries_for_the_size_of_the_example(loop, library_calls):
    cumulated, path = loop
    module = aotexport_runtime.load(path, target="cpu", trust="native")

    for count in (4, 6):
        given = torch.rand(count, 3)
        for got, expected in zip(module(given), cumulated(given), strict=True):
            assert torch.allclose(got, expected)
    assert library_calls == ["infer.forward.so"]


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


def test_double_backward_is_that_of_the_forward_graph(pair):
    for module in pair:
        loss, _ = module(*example())
        (gradient,) = torch.autograd.grad(loss, [module.get_parameter("norm.weight")], create_graph=True)
        gradient.square().sum().backward()

    grads = [module.get_parameter("out.weight").grad for module in pair]
    assert (grads[0] is None) == (grads[1] is None)


@pytest.mark.parametrize("index", [20, -1])
def test_index_out_of_bounds_raises_eagers_error(pair, index):
    words, scale = example()
    words[1, 2] = index

    with pytest.raises(IndexError) as caught:
        pair[0](words, scale)

    assert str(caught.value) == "index out of range in self"


def test_parameter_changed_before_backward_is_noticed(pair):
    loss, _ = pair[0](*example())
    with torch.no_grad():
        pair[0].get_parameter("out.weight").add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    with pytest.raises(NotSupported) as caught:
        aotexport_runtime.load(words, target="cpu")
    assert str(caught.value) == f"target `cpu` cannot run here: the bundle has portable, {name}; not {name}: {reason}"


def test_nan_that_libraries_lack_fails_the_self_test(words, tmp_path):
    planted = with_nan(words, tmp_path / "planted", "call 0: output[1]")
    with pytest.raises(aotexport_runtime.SelfTestFailed) as caught:
        aotexport_runtime.selftest(planted, target="cpu", trust="native")
    assert str(caught.value).splitlines()[1:] == [
        "  train/example, libraries (cpu): call 0: output[1]: relative error inf"
    ]


def test_auto_with_trust_takes_the_libraries(words, library_calls):
    step(aotexport_runtime.load(words, trust="native"), example())

    assert library_calls == ["train.forward.so", "train.backward.so"]


@pytest.fixture(scope="module")
def functions(loop, tmp_path_factory):
    """Return the functions of two bundles with libraries, by the bundle's directory; not to be written to."""
    path = tmp_path_factory.mktemp("bundles") / "sine"
    options = {"targets": ("cpu",), "programs": ("infer",), "verify": False}
    aotexport.export(lambda x: (x.sin(),), (torch.rand(4, 3),), output=path, **options)
    return {path: lambda x: (x.sin(),), loop[1]: loop[0]}


@pytest.mark.slow
@pytest.mark.parametrize("by_link", [False, True])
def test_library_in_the_place_of_another_is_loaded_anew(tmp_path, functions, by_link):
    x = torch.rand(4, 3)
    place = tmp_path / "b"
    modules = []
    for path, function in functions.items():
        if by_link:
            place.unlink(missing_ok=True)
            place.symlink_to(path)
        else:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(path, place)
        modules.append(aotexport_runtime.load(place, target="cpu", trust="native"))

        torch.testing.assert_close(tuple(modules[-1](x)), tuple(function(x)))
    torch.testing.assert_close(modules[0](x), (x.sin(),))


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


def test_library_of_a_higher_level_runs_portable(words, library_calls, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")

    step(aotexport_runtime.load(words, trust="native"), example())

    assert library_calls == []


def test_tuned_weights_are_saved_with_the_libraries(pair, tmp_path, library_calls):
    with torch.no_grad():
        pair[0].get_parameter("out.bias").add_(1)
    aotexport_runtime.save(pair[0], tmp_path / "tuned")
    library_calls.clear()

    step(aotexport_runtime.load(tmp_path / "tuned", target="cpu", trust="native"), example())

    assert library_calls == ["train.forward.so", "train.backward.so"]


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


@pytest.mark.slow
def test_mixed_precision_is_compared_with_the_rounding_of_its_operators(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.layer(x)
            return hidden.float().square().mean(), hidden.double()

    torch.manual_seed(0)
    example = (torch.randn(4, 8, 16),)
    report = aotexport.export(Mixed(), example, output=tmp_path / "b", targets=("cpu",), programs="infer")

    compared = [comparison for comparison in report.comparisons if comparison.target == "portable"]
    assert max(comparison.error for comparison in compared) == 0
    assert [entry.targets for entry in report.manifest.programs] == [("portable", f"cpu-{OWN.name}")]


class LargeLayers(nn.Module):
    """Two layers with a draw between them, large enough for a choice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 160)
        self.second = nn.Linear(160, 128, bias=False)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x), 0.5, self.training)).square().mean()


@pytest.mark.slow
@pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
def test_library_chooses_its_matmuls_before_its_first_results_are_given_out(tmp_path):
    torch.manual_seed(0)
    model, x = LargeLayers(), torch.randn(128, 128)
    path = tmp_path / "layers"
    aotexport.export(model, (x,), output=path, targets=("portable", "cpu"), verify=False, programs=("train",))
    module = aotexport_runtime.load(path, target="cpu", trust="native", matmul="onednn").train()

    def results(module):
        torch.manual_seed(1)
        module.zero_grad()
        loss = module(x)
        loss.backward()
        return [loss, *(parameter.grad.clone() for parameter in module.parameters()), torch.rand(1)]

    first, later, expected = results(module), results(module), results(model)

    (folder,) = (path / "targets").iterdir()
    tables = {file.name: table_of(file) for file in folder.glob("*.so")}
    matmuls = {name: [p.by_onednn for p in table.matmuls[: table.count]] for name, table in tables.items()}
    assert matmuls == {"train.forward.so": [1, 1], "train.backward.so": [1, 1, 1]}
    assert all(torch.equal(one, other) for one, other in zip(first, later, strict=True))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)

    # The table is the library's, and so there is one for the process.
    other = aotexport_runtime.load(path, trust="native", matmul="torch").train()
    torch.testing.assert_close(results(other), expected, rtol=1e-5, atol=1e-6)
    reason = (
        "this process has the library `train.forward.so` loaded with matmul=`onednn`; for matmul=`torch`, load it "
        "in another process"
    )
    asked = aotexport_runtime.load(path, target="cpu", trust="native", matmul="torch").train()
    with pytest.raises(aotexport_runtime.NotSupported) as caught:
        asked(x)
    assert str(caught.value) == (
        f"target `cpu` was asked for and does not run program `train` on cpu: {folder.name}: {reason}. Target `auto` "
        "runs the fastest of those that do"
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [pools, bfloat16_extrema])
def test_operators_that_the_compiler_gets_wrong_have_libraries_that_agree(tmp_path, make):
    torch.manual_seed(0)
    model, args, _ = make()
    report = aotexport.export(model, args, output=tmp_path / "b", targets=("cpu",), programs="train")

    assert [entry.targets for entry in report.manifest.programs] == [("portable", f"cpu-{OWN.name}")]
    assert {c.agrees for c in report.comparisons if c.target == f"cpu-{OWN.name}"} == {True}


@pytest.mark.slow
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
    assert [reason for reason in reasons if "disagreed" in reason] == [], json.dumps(targets)
    far = [
        comparison
        for comparison in report.comparisons
        if comparison.target.startswith("cpu")
        and not comparison.error <= 2e-5
        and rounding(bundle, comparison.program) <= 1e-4
    ]
    assert far == []
