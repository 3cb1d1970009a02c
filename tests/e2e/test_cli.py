"""The command line as a user meets it: real model files, real bundles, exit codes, both output streams."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import aotexport_runtime
from aotexport.cli import app
from aotexport.verify.report import verification_table
from aotexport_runtime.errors import printable
from tests.forked import run_script

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return {"logits": self.linear(self.norm(x)), "x": x}

torch.manual_seed(0)
model = Net()
example_inputs = (torch.randn(8, 3),)
"""
FUNCTION = """
import torch

def model(x, y):
    return x.sin() + y

example_inputs = (torch.ones(4), torch.ones(4))
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, in a fresh working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a verified bundle of `NET`, its model file beside it."""
    folder = tmp_path_factory.mktemp("net")
    (folder / "net.py").write_text(NET)
    result = CliRunner().invoke(app, [str(folder / "net.py"), "-o", str(folder / "bundle"), "--dynamic", "x:0=n[2:64]"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, "verify in a fresh process")
    return folder / "bundle"


def test_interrupt_leaves_nothing_and_exits_with_130(tmp_path: Path) -> None:
    interrupted = (
        "\ndef model(x, y):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGINT)\n    return x + y\n"
    )
    (tmp_path / "net.py").write_text(FUNCTION + interrupted)
    text = "import signal\nfrom aotexport.cli import main\n"
    text += "signal.signal(signal.SIGINT, signal.default_int_handler)\nmain()"
    done = run_script(None, "net.py", "-o", "bundle", cwd=tmp_path, text=text)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "error: interrupted; nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]


def test_export_closes_with_a_summary_and_tells_the_stages(run: Run) -> None:
    Path("net.py").write_text(NET)
    result = run("net.py", "-o", "bundle", "--program", "infer")
    assert result.exit_code == 0, result.output
    stages = result.stderr.splitlines()
    assert (stages[:2], stages[-1]) == (["import torch", "load net.py"], "verify in a fresh process")
    assert "infer: forward graph" in stages
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:7] == ["bundle:", "Net", "(module),", "4", "parameters", "(14", "elements),"]
    assert ["infer", "eval", "portable", "2", "forward,"] in [line[:5] for line in lines]
    assert re.search(r"^equal to eager in \d+ comparisons$", result.stdout, re.MULTILINE)
    assert 'sizes are fixed as in the example: x[8, 3]; `--dynamic "x:0=batch"` for others' in result.stdout
    assert lines[-1][:4] == ["next:", "`aotexport", "inspect", "bundle`;"]


@pytest.mark.parametrize(("model", "left_out"), [(FUNCTION, ""), (NET, "returns `output['x']` as a view of `x`")])
def test_export_for_serving_ships_what_can_be_made_and_says_why_the_rest_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str, left_out: str
) -> None:
    Path("model.py").write_text(model, encoding="utf-8")
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("model.py", "-o", "bundle", "--for", "serving", "--fast")
    assert result.exit_code == 0, result.output
    manifest = aotexport_runtime.open_bundle("bundle").manifest
    targets = ("portable",) if left_out else ("portable", "onnx")
    assert [(entry.name, entry.targets) for entry in manifest.programs] == [("infer", targets)]
    assert "the bundle has no libraries: this machine has no C++ compiler `no-such-compiler`" in result.output
    assert left_out in result.output
    assert ("for serving: ONNX models, " in result.output) is not bool(left_out)
    assert bool(list(Path("bundle").glob("*.onnx"))) is not bool(left_out)


def test_quiet_export_prints_only_what_a_user_must_know(run: Run) -> None:
    Path("net.py").write_text(NET)
    result = run("net.py", "-o", "bundle", "--quiet", "--program", "infer")
    assert (result.exit_code, result.output) == (0, "")
    Path("flag.py").write_text(
        "import torch\n\ndef model(x):\n    return x + 1 if x.sum() > 0 else x - 1\n\nexample_inputs = torch.ones(4)\n"
    )
    result = run("flag.py", "-o", "flag", "-q")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(
        "fixed (infer): flag.py:4 in model: code of the model branches on values of tensors"
    )


VERIFIED_CALLS = {
    "--no-verify": ("none", {"example", "batch-is-0", "batch-is-1", "other-sizes"}),
    "--fast": ("fast", {"example", "batch-is-0", "batch-is-1", "other-sizes"}),
    "--verify=standard": ("standard", {"example", "batch-is-0", "batch-is-1", "other-sizes"}),
    "--verify=full": (
        "full",
        {"example", "random", "batch-is-0", "batch-is-1", "other-sizes"} | {f"drawn-{call}" for call in range(1, 9)},
    ),
}


@pytest.mark.parametrize("option", VERIFIED_CALLS)
def test_export_records_the_calls_of_its_verification_and_the_manifest_names_it(run: Run, option: str) -> None:
    Path("function.py").write_text(FUNCTION)
    result = run("function.py", "-o", "bundle", option, "--dynamic", "x:0=batch", "--dynamic", "y:0=batch", "--json")
    assert result.exit_code == 0, result.output
    manifest = json.loads(Path("bundle/bundle.json").read_text())
    found = {entry["name"] for entry in manifest["testvectors"]}
    assert (manifest["verification"], found) == VERIFIED_CALLS[option]
    compared = sum(row["comparisons"] for row in json.loads(result.stdout)["verification"])
    assert (compared > 0) == (option != "--no-verify")


def test_export_of_a_program_without_functional_graph_says_why(run: Run) -> None:
    text = "import torch\ndef model(x):\n    return x.detach().requires_grad_() * 2\nexample_inputs = torch.ones(3)\n"
    Path("flagged.py").write_text(text)
    result = run("flagged.py", "-o", "bundle", "--no-verify")
    assert result.stdout.splitlines()[4:7] == [
        "infer: no inference graph, the forward graph runs instead: the model calls `requires_grad_`",
        "",
        "not verified (--no-verify)",
    ]


def test_export_with_options_obeys_them(run: Run) -> None:
    Path("net.py").write_text(NET)
    options = ["--dtype", "bfloat16", "--strip", "--no-verify", "--dynamic", "x:0=rows[2:9]"]
    assert run("export", "net.py", "-o", "bundle", *options).exit_code == 0
    bundle = aotexport_runtime.open_bundle("bundle")
    assert {e.name: e.dtype for e in bundle.manifest.state if e.name.startswith("linear")} == {
        "linear.weight": "bfloat16",
        "linear.bias": "bfloat16",
    }
    program = bundle.program("infer")
    assert [(d.name, d.min, d.max) for d in program.dimensions] == [("rows", 2, 9)]
    assert bundle.graph("infer", program.forward.file).sources == ()


def test_export_that_dumps_passes_writes_the_graphs_of_every_program(run: Run) -> None:
    Path("net.py").write_text(NET)
    assert run("export", "net.py", "-o", "bundle", "--no-verify", "--dump-passes", "passes").exit_code == 0
    for name in ("train", "infer"):
        traced, *_, last = sorted(Path("passes", name).iterdir())
        assert (traced.name, last.name[:2]) == ("00-traced.txt", "12" if name == "train" else "08")
        assert "requires_grad = state linear.weight" in traced.read_text()
        assert "aten.linear.default(" in last.read_text()


@pytest.mark.usefixtures("fresh_processes")
def test_model_file_named_like_a_module_of_python_is_verified_with_operators_of_one_beside_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("nets").mkdir()
    Path("nets/beside.py").write_text(
        "import torch\n@torch.library.custom_op('beside::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "@twice.register_fake\ndef _(x):\n    return torch.empty_like(x)\n"
    )
    text = "import torch, beside\ndef model(x):\n    return beside.twice(x)\n"
    Path("nets/inspect.py").write_text(
        text + "example_inputs = torch.ones(3)\ncustom_ops = [beside]\nkeep_operators = ['beside']\n"
    )
    monkeypatch.chdir("nets")
    assert run("inspect.py", "-o", "../bundle").exit_code == 0


def test_failure_of_the_exporter_itself_asks_for_a_report_with_versions(run: Run) -> None:
    method = "    def named_modules(self, *args, **kwargs):\n        raise RuntimeError('odd')\n"
    Path("net.py").write_text(NET.replace("    def forward", method + "\n    def forward"))
    result = run("net.py", "-o", "out")
    versions = f"aotexport 0.1.0, torch {metadata.version('torch')}, Python {sys.version.split()[0]}"
    lines = result.stderr.splitlines()
    assert result.exit_code == 3
    assert (
        "error: aotexport failed where it should not (RuntimeError). Please report this as a bug, with these versions "
        f"({versions}) and the lines below"
    ) in lines
    assert "RuntimeError: odd" in lines


def test_inspect_shows_inputs_outputs_changes_and_graphs(run: Run, bundle: Path) -> None:
    result = run("inspect", bundle)
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    for expected in [
        "written by aotexport 0.1.0 with torch " + torch.__version__,
        "program train (train mode), targets: portable",
        "x: float32[n, 3]",
        "dimension n in [2:64]",
        "output['x']: float32[n, 3], is the input x itself",
        "changes the values of norm.running_var",
    ]:
        assert expected in lines
    reason = "no matmul is large enough to gain by oneDNN"
    assert lines.count(f"under target auto the forward graph runs: {reason}") == 2


def test_inspect_names_the_types_of_numbers(run: Run) -> None:
    values = "x.sum().item(), x.shape[0] / 2, x.shape[0] + 1, (x.sum() > 0).item(), int(x.sum()), 2.5, True"
    Path("numbers.py").write_text(f"import torch\ndef model(x):\n    return {values}\nexample_inputs = torch.ones(3)\n")
    assert run("numbers.py", "-o", "bundle", "--no-verify", "--dynamic", "x:0=n[1:9]").exit_code == 0
    outputs = json.loads(run("inspect", "bundle", "--json").stdout)["programs"]["infer"]["outputs"]
    assert [line.partition(": ")[2] for line in outputs] == ["float", "float", "int", "bool", "int", "2.5", "True"]


def test_inspect_as_json_prints_one_document(run: Run, bundle: Path) -> None:
    document = json.loads(run("inspect", bundle, "--json", "--program", "infer", "--graph").stdout)
    assert document["manifest"]["name"] == "Net"
    assert list(document["programs"]) == ["infer"]
    assert set(document["programs"]["infer"]["graphs"]) == {"forward.json", "inference.json"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é\n", "plain é\n"), ("\x1b[31mred", "\\x1b[31mred"), ("a\rb\tc\u202e", "a\\rb\\tc\\u202e")],
)
def test_control_characters_of_a_bundle_do_not_reach_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_verify_finds_a_recorded_result_that_the_bundle_does_not_give(run: Run, bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    in_copy = copy / "testvectors/infer.example.safetensors"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    tensors = load_file(in_copy)
    save_file({**tensors, "v0": tensors["v0"] + 1}, in_copy)
    _sign(copy, in_copy)
    result = run("verify", copy)
    assert result.exit_code == 1
    wrong = [line.strip().split(": relative error")[0] for line in result.stdout.splitlines()]
    assert [line for line in wrong if line.startswith("infer/")] == [
        "infer/example, forward graph (autograd): call 0: output['logits']",
        "infer/example, inference graph (portable): call 0: output['logits']",
    ]
    assert result.stdout.count("FAILED") == 2


def _sign(bundle: Path, changed: Path) -> None:
    """Give the manifest the new digest of a changed file."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    entry = next(entry for entry in manifest["files"] if (bundle / entry["path"]) == changed)
    entry |= {"sha256": hashlib.sha256(changed.read_bytes()).hexdigest(), "nbytes": changed.stat().st_size}
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def test_verify_of_a_damaged_bundle_exits_with_1(run: Run, bundle: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", bundle, tmp_path / "copy"], check=True)
    readme = tmp_path / "copy/README.md"
    readme.write_text(readme.read_text().upper())
    result = run("verify", "copy")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: README.md: its SHA-256 differs from the manifest's: the file was changed or damaged after export. "
        "Copy the bundle again, or export it again [file-differs]\n",
    )


def test_verify_against_its_model_file_agrees_whatever_the_weights(run: Run, bundle: Path) -> None:
    # Other initial weights: the model of the file is given those of the bundle.
    Path("net.py").write_text(NET.replace("manual_seed(0)", "manual_seed(1)"))
    result = run("verify", bundle, "--against", "net.py", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["agrees"]) == (0, True)
    assert {(call["program"], call["target"]) for call in document["calls"]} == {
        (program, target) for program in ("train", "infer") for target in ("autograd", "portable")
    }


def test_verify_against_a_changed_model_file_shows_what_differs(run: Run, bundle: Path) -> None:
    Path("net.py").write_text(NET.replace("self.linear(", "2 * self.linear("))
    result = run("verify", bundle, "--against", "net.py")
    assert result.exit_code == 1
    assert "infer/example (portable): call 0: output['logits']: relative error" in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "self.linear = nn.Linear(3, 2)",
            "self.linear = nn.Linear(3, 2, bias=False); self.extra = nn.Parameter(torch.ones(1))",
            "error: the weights of the bundle do not fit the model of `net.py`:\n"
            "  `linear.bias` is in the bundle alone\n"
            "  `extra` is in `net.py` alone\n",
        ),
        (
            "self.linear = nn.Linear(3, 2)",
            "self.linear = nn.Linear(3, 2).double(); self.linear.bias = nn.Parameter(torch.ones(3))",
            "error: the weights of the bundle do not fit the model of `net.py`:\n"
            "  `linear.weight` is float32[2, 3] in the bundle and float64[2, 3] in the model (give --dtype as at the "
            "export)\n  `linear.bias` is float32[2] in the bundle and float32[3] in the model\n",
        ),
        (
            "self.linear = nn.Linear(3, 2)",
            "from torch.testing._internal.two_tensor import TwoTensor as Two\n        self.linear = nn.Linear(3, 2)\n"
            "        self.linear.weight = nn.Parameter(Two(torch.ones(2, 3), torch.ones(2, 3)))",
            "error: the weights of the bundle do not fit the model of `net.py`:\n  `linear.weight` is plain in the "
            "bundle and a `torch.testing._internal.two_tensor:TwoTensor` in the model, or its context is another\n",
        ),
        (
            "def forward(self, x):",
            "def forward(self, y):\n        x = y",
            "error: program `train` has the tensor inputs x; the example call of `net.py` has y\n",
        ),
    ],
)
def test_verify_against_a_model_file_that_does_not_fit_says_why(
    run: Run, bundle: Path, old: str, new: str, message: str
) -> None:
    Path("net.py").write_text(NET.replace(old, new))
    result = run("verify", bundle, "--against", "net.py")
    assert (result.exit_code, result.stderr) == (1, "compare with net.py\n" + message)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a bundle that differs from `bundle` in a program, its sizes, an operator and weights."""
    folder = tmp_path_factory.mktemp("other")
    text = NET.replace("manual_seed(0)", "manual_seed(1)").replace('"x": x', '"x": x.exp()')
    (folder / "net.py").write_text(text)
    arguments = [str(folder / "net.py"), "-o", str(folder / "bundle"), "--program", "infer", "--no-verify"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder / "bundle"


def test_diff_of_different_bundles_lists_what_changed_and_exits_with_1(run: Run, bundle: Path, other: Path) -> None:
    result = run("diff", bundle, other)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    expected = [
        "train train mode, targets portable -> absent",
        "x float32[n, 3] -> float32[8, 3]",
        "dimension n [2:64] -> absent",
        "aten::exp.default absent -> 1",
        "infer: forward.json",
        "files",
    ]
    assert [line for line in expected if line not in lines] == []
    assert not any(line.startswith("norm.weight") for line in lines)


def test_diff_as_json_gives_the_largest_difference_of_weights(run: Run, bundle: Path, other: Path) -> None:
    document = json.loads(run("diff", bundle, other, "--json").stdout)
    before, after = (aotexport_runtime.load(path).state_dict()["linear.weight"] for path in (bundle, other))
    assert document["differ"] is True
    assert [change for change in document["changes"] if change["name"] == "linear.weight"] == [
        {
            "section": "weights",
            "name": "linear.weight",
            "before": "parameter float32[2, 3], requires grad",
            "after": "parameter float32[2, 3], requires grad",
            "unequal": 6,
            "max_abs": pytest.approx((before - after).abs().max().item()),
        }
    ]


@pytest.mark.parametrize("command", [[], ["export"], ["inspect"], ["verify"], ["diff"]])
def test_help_of_every_command_teaches_by_an_example(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    _, _, example = result.stdout.partition("Example")
    assert f"aotexport {' '.join(command)}".removesuffix(" export").strip() in example


def test_help_and_version_do_not_import_torch(tmp_path: Path) -> None:
    script = "import sys; from aotexport.cli import app; app(sys.argv[1:], standalone_mode=False); "
    script += "sys.exit('torch' in sys.modules)"
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, option], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0


def test_onnx_adds_a_model_to_a_bundle_and_shows_the_errors(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    assert run("model.py", "-o", "bundle", "--no-verify").exit_code == 0
    result = run("onnx", "bundle", "--opset", "19")
    assert result.exit_code == 0, result.output
    assert "bundle/model.onnx: program infer, operator set 19, " in result.output
    assert "equal to eager in 2 comparisons" in result.output
    assert aotexport_runtime.open_bundle("bundle").manifest.programs[0].targets == ("portable", "onnx")


def test_table_of_differences_names_engines_beside_the_graphs() -> None:
    row = {"program": "infer", "kind": "output", "value": "output", "error": 1e-3, "absolute": 1e-4}
    table = verification_table([{**row, "target": target} for target in ("portable", "onnx")])
    assert [list(column.cells) for column in table.columns[:2]] == [["infer", "infer (onnx)"], ["output"] * 2]
