"""Matmuls by oneDNN beside torch's own, what is chosen between them, and what is kept of the choice."""

import json

import pytest
import torch

from aotexport_runtime import NotSupported
from aotexport_runtime.execution.functional_graph import by_onednn
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.execution.matmul.onednn import MATMULS, replacement
from aotexport_runtime.execution.matmul.sizes import mode_of
from aotexport_runtime.execution.user_cache import Measurements, cache_folder
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import TensorMeta
from tests.refusals import refusal

FIXED = (True, True, True)
ROWS_VARY = (False, True, True)
needs_onednn = pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")

LAYOUTS = {
    "plain": lambda m, n: torch.randn(m, n),
    "turned": lambda m, n: torch.randn(n, m).t(),
    "one_row_many_times": lambda m, n: torch.randn(1, n).expand(m, n),
    "one_column_many_times": lambda m, n: torch.randn(m, 1).expand(m, n),
    "part_turned": lambda m, n: torch.randn(n, m + 3)[:, 1 : m + 1].t(),
    "overlapping": lambda m, n: torch.randn(m + n).as_strided((m, n), (1, 1)),
}
BIASES = {"plain": lambda n: torch.randn(n), "one_number_many_times": lambda n: torch.randn(1).expand(n)}


def same(got, expected):
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert got._base is None
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_matmul_of_any_layout_by_onednn_is_torchs(left, right):
    torch.manual_seed(0)
    rows, matrix = LAYOUTS[left](16, 24), LAYOUTS[right](24, 8)
    same(replacement("aten::mm.default", "onednn", FIXED)(rows, matrix), torch.mm(rows, matrix))
    same(MATMULS["aten::mm.default"](rows, matrix), torch.mm(rows, matrix))


@needs_onednn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", BIASES)
def test_matmul_and_bias_of_any_layout_by_onednn_are_torchs(bias, layout):
    torch.manual_seed(0)
    added, rows, matrix = BIASES[bias](8), torch.randn(16, 24), LAYOUTS[layout](24, 8)
    same(MATMULS["aten::addmm.default"](added, rows, matrix), torch.addmm(added, rows, matrix))
    same(onednn.linear(rows, matrix.t(), added), torch.nn.functional.linear(rows, matrix.t(), added))
    same(onednn.linear(rows, matrix.t()), torch.nn.functional.linear(rows, matrix.t()))


def meta(*shape, dtype="float32"):
    return TensorMeta(dtype=dtype, shape=shape, stride=(1,) * len(shape))


@pytest.mark.parametrize(
    ("op", "metas", "modes"),
    [
        ("mm", [meta(128, 256), meta(256, 128)], ["fastest", "onednn"]),
        ("mm", [meta(128, 256, dtype="bfloat16"), meta(256, 128, dtype="bfloat16")], []),
        ("mm", [meta("s0", 256), meta(256, 128)], ["fastest", "onednn"]),
        ("mm", [meta(16, 24), meta(24, 8)], ["onednn"]),
        ("mm", [meta(1, 24), meta(24, 8)], []),
        ("addmm", [meta(128), meta(128, 256), meta(256, 128)], ["fastest", "onednn"]),
        ("addmm", [meta(128, 128), meta(128, 256), meta(256, 128)], []),
        ("linear", [meta(128, 256), meta(512, 256), meta(512)], ["fastest", "onednn"]),
        ("linear", [meta("s0", 256), meta("s1", 256), meta("s0")], []),
        ("linear", [meta(2, 128, 256), meta(512, 256)], []),
        ("bmm", [meta(2, 128, 256), meta(2, 256, 128)], []),
    ],
)
def test_matmuls_may_be_chosen(op, metas, modes):
    names = [f"x{index}" for index in range(len(metas))]
    node = Node(name="y", op=f"aten::{op}.default", args=list(names), meta=meta(2, 2))
    known = dict(zip(names, metas, strict=True))
    assert [mode for mode in ("fastest", "onednn", "torch") if by_onednn([node], known, mode)] == modes


@needs_onednn
@pytest.mark.parametrize("kept", [True, False])
def test_what_another_process_kept_is_chosen_without_a_measurement(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(onednn, "_known", {})
    monkeypatch.setattr(onednn, "clearly_faster", None)
    chosen = []
    monkeypatch.setitem(onednn.MATMULS, "aten::mm.default", lambda *args: chosen.append(args) or torch.mm(*args))
    onednn.kept(cache_folder("matmul"), torch.get_num_threads()).add("mm 128x128@rows 128x256@rows", kept)
    rows, matrix = torch.randn(128, 128), torch.randn(128, 256)
    same(replacement("aten::mm.default", "fastest", FIXED)(rows, matrix), torch.mm(rows, matrix))
    assert bool(chosen) is kept


@pytest.fixture
def decisions(monkeypatch):
    """Return a list that grows with each matmul that is measured; the measurement finds for oneDNN."""
    asked: list[str] = []
    monkeypatch.setattr(onednn, "faster_by_onednn", lambda matmul, ours, torchs: [asked.append(matmul)] != [])
    return asked


@needs_onednn
@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("mm", lambda rows: (torch.randn(rows, 128), torch.randn(128, 256))),
        ("mm", lambda rows: (torch.randn(rows, 128), torch.randn(256, 128).t())),
        ("mm", lambda rows: (torch.randn(rows, 128), torch.randn(256, 256)[::2])),
        ("addmm", lambda rows: (torch.randn(256), torch.randn(rows, 128), torch.randn(128, 256))),
        ("linear", lambda rows: (torch.randn(rows, 128), torch.randn(256, 128), torch.randn(256))),
    ],
    ids=["rows", "columns", "apart", "addmm", "linear"],
)
@pytest.mark.parametrize("mode", ["fastest", "onednn"])
def test_matmul_of_any_size_is_torchs(decisions, op, make, mode):
    torch.manual_seed(0)
    matmul = replacement(f"aten::{op}.default", mode, ROWS_VARY)
    for rows in (0, 1, 5, 64, 65, 64, 100, 128):
        args = make(rows)
        same(matmul(*args), getattr(torch.ops.aten, op).default(*args))


@needs_onednn
def test_sizes_are_measured_for_all_up_to_the_next_power_of_two(decisions):
    matmul = replacement("aten::mm.default", "fastest", ROWS_VARY)
    for rows in (64, 65, 128, 129, 64, 8):
        matmul(torch.ones(rows, 128), torch.ones(128, 256))
    assert decisions == [f"mm <={n}x128@rows 128x256@rows" for n in (64, 128, 128, 256)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"found": 3}', "\x00"])
def test_kept_file_that_is_broken_is_done_without(text, tmp_path):
    cache = Measurements(tmp_path, ["2.13", 2])
    cache.add("a", True)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert cache.read() == {}
    cache.add("b", True)
    assert json.loads(file.read_text())["found"] == {"b": True}


def test_mode_is_the_callers_then_the_environments(monkeypatch):
    monkeypatch.delenv("AOTEXPORT_MATMUL", raising=False)
    assert mode_of(None) == "fastest"
    monkeypatch.setenv("AOTEXPORT_MATMUL", "torch")
    assert mode_of(None) == "torch"
    assert mode_of("onednn") == "onednn"
    monkeypatch.setenv("AOTEXPORT_MATMUL", "mkl")
    assert refusal(NotSupported, mode_of, None) == (
        "environment variable AOTEXPORT_MATMUL asks for the `mkl` matmul backend; there are fastest, onednn, torch"
    )
    assert refusal(NotSupported, mode_of, "fast") == "no `fast` matmul backend; there are fastest, onednn, torch"
