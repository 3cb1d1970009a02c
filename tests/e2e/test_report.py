"""`aotexport report` and `aotexport profile`: memory beside torch's count, and pages that show what they got."""

import json
import re
import shutil
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
from aotexport_runtime.inspection.view import graphs_of

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


def test_graphs_for_graphviz_and_netron_name_operators_or_modules(bundles, tmp_path):
    graphs = graphs_of(aotexport_runtime.open_bundle(bundles[Block]), ["infer"])["graphs"]
    operators = {node["id"]: node["namespace"] for node in graphs[1]["nodes"]}
    for depth in (), ("--depth", "1"):
        given = "--format", "netron", "-o", tmp_path / "graph.dot", *depth
        assert invoke("view", bundles[Block], *given).exit_code == 0
        text = (tmp_path / "graph.dot").read_text()
        named = re.findall(r'^  "([^"]+)" \[label="\{\1\|op_code=call_function\\l\|.+\\l\}"\];$', text, re.MULTILINE)
        arrows = re.findall(r'^  "(.+?)" -> "(.+?)";$', text, re.MULTILINE)
        assert {name for arrow in arrows for name in arrow} == {*named}
        modules = {f"module:{name}" for name in ("first", "second", "head")} if depth else set()
        assert {*named} == {name for name, module in operators.items() if not (depth and module)} | modules


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
