"""Recorded calls that keep fewer elements: they agree with what is observed, and notice the same wrong graphs."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import aotexport
from aotexport.vectors import thin
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.values.compare import NORMS, SAMPLE, compare, kept
from aotexport_runtime.values.observe import Observation, sampled
from tests.hostile.crafted import Crafted
from tests.reader.bundle import without_tables


@given(count=st.integers(0, 20_000), sample=st.sampled_from([1, 32, 64, 1024, SAMPLE]))
def test_value_halved_from_a_kept_one_is_the_value_halved_at_once(count: int, sample: int) -> None:
    flat = torch.arange(count)
    assert torch.equal(kept(kept(flat, SAMPLE), sample), kept(flat, sample))
    assert len(kept(flat, sample)) <= sample


def test_value_with_more_elements_keeps_its_2_norm_and_its_greatest_finite_magnitude() -> None:
    flat = torch.tensor([3.0, -4.0, 0.0, 0.0, torch.inf])
    kept = sampled("output", flat, 2)
    assert kept["output"].tolist() == [3.0, torch.inf]
    assert kept["output" + NORMS].tolist() == [torch.inf, 4.0]
    assert sampled("output", flat, 5).keys() == {"output"}


def test_error_is_relative_to_the_greatest_element_also_where_that_is_not_kept() -> None:
    flat = torch.full((64,), 1e-6)
    flat[1] = 1.0
    other = flat.clone()
    other[0] = 3e-6
    found = [Observation(values=sampled("output", each, 32)) for each in (flat, other)]
    assert all(difference.agrees for difference in compare(*found))


class Net(nn.Module):
    """Layers of several kinds, whose gradients outweigh what recorded calls may take."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8 * 36, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.norm(self.convolution(x))).flatten(2).transpose(1, 2)
        return torch.tanh(self.head(self.attention(x).flatten(1))).softmax(1).log()


def nbytes(bundle: Path) -> int:
    return sum(path.stat().st_size for path in (bundle / "testvectors").glob("*.safetensors"))


WRONG = {
    "aten::add.Tensor": "aten::sub.Tensor",
    "aten::sub.Tensor": "aten::add.Tensor",
    "aten::mul.Tensor": "aten::div.Tensor",
    "aten::div.Tensor": "aten::mul.Tensor",
    "aten::neg.default": "aten::abs.default",
    "aten::relu.default": "aten::abs.default",
    "aten::sigmoid.default": "aten::tanh.default",
    "aten::tanh.default": "aten::sigmoid.default",
    "aten::log.default": "aten::exp.default",
}
"""Operators that make a graph wrong in the place of another."""


def wrong_graphs(text: str) -> list[str]:
    """Return the text of a graph with one operator after another replaced."""
    graph, found = without_tables(json.loads(text)), list[str]()
    for node in graph["nodes"]:
        if WRONG.get(op := node["op"]):
            node["op"] = WRONG[op]
            found.append(json.dumps(graph))
            node["op"] = op
    return found


def noticed(bundle: Path, root: Path, file: str, text: str, target: str = "portable") -> bool:
    """Return whether the self-test tells a bundle with another graph from the original."""
    crafted = Crafted(bundle, root)
    crafted.write(file, text.encode())
    return not all(result.agrees for result in run_vectors(crafted.seal(), target=target))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a network with the least of recorded calls, whose arguments are made."""
    directory = tmp_path_factory.mktemp("made") / "bundle"
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thin, "_MOST_NBYTES", 0)
        aotexport.export(Net(), (torch.randn(22, 3, 8, 8),), output=directory, verify=False)
    return directory


UNSEEN = {
    # Which kernels may run.
    "aten::batch_norm.default[8]",
    # Between no dropout and dropout of nothing.
    "aten::dropout.default[2]",
    # Of a call that keeps its statistics, or drops nothing.
    "infer aten::batch_norm.default[6]",
    "infer aten::_native_batch_norm_legit_no_training.default[5]",
    "infer aten::dropout.default[1]",
    # The sum is given its shape by a view.
    "aten::sum.dim_IntList[2]",
    # The kernel knows no dropout.
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default[6]",
    # Backward takes the deviations that forward has saved.
    "aten::native_batch_norm_backward.default[8]",
}
"""Constants that results do not depend on, by operator and place, of the program `infer` or of both."""


def wrong_constants(text: str, program: str) -> list[str]:
    """Return the text of a graph with one float larger, or one truth value turned round, after another."""
    graph, found = without_tables(json.loads(text)), list[str]()
    for node in graph["nodes"]:
        for place, value in enumerate(node.get("args", [])):
            at = f"{node['op']}[{place}]"
            if isinstance(value, bool | float) and not {at, f"{program} {at}"} & UNSEEN:
                node["args"][place] = not value if isinstance(value, bool) else value + 0.01
                found.append(json.dumps(graph))
                node["args"][place] = value
    return found


@pytest.mark.parametrize("graph", ["train/joint", "infer/forward"])
def test_calls_with_made_arguments_notice_every_wrong_graph(made: Path, tmp_path: Path, graph: str) -> None:
    records = [json.loads(path.read_text()) for path in (made / "testvectors").glob("*.json")]
    assert [[len(spec["quantiles"]) for spec in record["inputs"]] for record in records] == [[33], [33]]
    file, target = f"programs/{graph}.json", "autograd" if "forward" in graph else "portable"
    text = (made / file).read_text()
    graphs = wrong_graphs(text) + wrong_constants(text, graph.partition("/")[0])
    assert len(graphs) > 5
    unnoticed = [
        number for number, wrong in enumerate(graphs) if not noticed(made, tmp_path / str(number), file, wrong, target)
    ]
    assert unnoticed == []


def test_bundle_of_a_small_model_is_not_outweighed_by_its_recorded_calls(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(9)))
    aotexport.export(model, (torch.randn(3, 96),), output=tmp_path / "bundle")
    assert 0 < nbytes(tmp_path / "bundle") <= 256_000
    manifest = json.loads((tmp_path / "bundle/bundle.json").read_text())
    open_bundle(tmp_path / "bundle")
    samples = {json.loads((tmp_path / "bundle" / v["record"]).read_text())["sample"] for v in manifest["testvectors"]}
    assert len(samples) == 1
    assert samples.pop() < SAMPLE
