"""State to safetensors files and back: every dtype, ties and overlaps, shards, and files that training leaves alone."""

import copy
import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import aotexport_runtime
from aotexport.errors import ExportFailed
from aotexport.model.state import collect_state
from aotexport.write.files import list_files
from aotexport.write.weights import write_weights
from aotexport_runtime.bundle import weights
from aotexport_runtime.bundle.directory import BundleDirectory
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import load_tensors
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.schema.manifest import Manifest, Producer, ProgramEntry
from tests.models import module
from tests.refusals import refusal

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def written(holder: nn.Module, root, **options) -> Bundle:
    state = write_weights(collect_state(holder), root, **options)
    manifest = Manifest(
        format="1.0",
        min_reader="1.0",
        calling_convention=1,
        producer=Producer(aotexport="0", torch="0"),
        name="Holder",
        kind="module",
        programs=(ProgramEntry(name="train"),),
        state=state,
        files=list_files(root),
    )
    return Bundle(BundleDirectory(root), manifest)


def round_trip(holder: nn.Module, root, *, mapped: bool = True, **options) -> dict[str, torch.Tensor]:
    bundle = written(holder, root, **options)
    return load_tensors(bundle, bundle.manifest.state, Environment().form, mapped=mapped)


def bits(tensor: torch.Tensor) -> list[int]:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.contiguous().untyped_storage()).tolist()


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def mapped(request):
    return request.param


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_every_dtype_is_restored_to_the_bit(tmp_path, dtype, mapped):
    nbytes = 6 * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).reshape(2, 3)
    restored = round_trip(module(value=tensor), tmp_path, mapped=mapped)["value"]
    assert (restored.dtype, restored.shape, restored.stride()) == (dtype, (2, 3), (3, 1))
    assert bits(restored) == bits(tensor)


LAYOUTS = {
    "scalar": lambda: torch.tensor(3.0),
    "zero_size": lambda: torch.zeros(0, 4),
    "zero_size_turned": lambda: torch.zeros(0, 4).t(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "every_other": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels_last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "part_of_a_larger": lambda: torch.arange(100.0)[10:14],
    "complex_transposed": lambda: torch.arange(6.0).reshape(2, 3).to(torch.complex128).t(),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_tensor_of_any_layout_is_restored_with_its_values_and_strides(tmp_path, make, mapped):
    tensor = make()
    restored = round_trip(module(value=tensor), tmp_path, mapped=mapped)["value"]
    assert torch.equal(restored, tensor)
    assert (restored.shape, restored.stride()) == (tensor.shape, tensor.stride())


OVERLAPS = {
    "same_storage": lambda base: (base, base.view(3, 4)),
    "transposed": lambda base: (base.view(3, 4), base.view(3, 4).t()),
    "slices_that_overlap": lambda base: (base[:8], base[4:]),
    "slice_inside_of_another": lambda base: (base, base[2:9:3]),
}


@pytest.mark.parametrize("make", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_overlapping_tensors_overlap_again(tmp_path, make, dtype, mapped):
    first, second = make(torch.arange(12).to(dtype))
    restored = round_trip(module(first=first, second=second), tmp_path, mapped=mapped)
    assert shares(restored["first"], restored["second"])
    for value in (first, restored["first"]):
        value.mul_(10)
    assert torch.equal(restored["second"], second)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_disjoint_parts_of_one_storage_are_stored_apart(tmp_path, order):
    halves = torch.arange(12.0).split(6)
    restored = round_trip(module(first=halves[order[0]], second=halves[order[1]]), tmp_path)
    assert not shares(restored["first"], restored["second"])
    assert torch.equal(restored["second"], halves[order[1]])


def test_overlap_of_different_dtypes_is_refused(tmp_path):
    base = torch.arange(4.0)
    said = refusal(ExportFailed, written, module(first=base, second=base.view(torch.int32)), tmp_path)
    assert said == "`first` and `second` share memory with different dtypes"


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda base: base.conj().imag])
def test_conjugated_or_negated_view_is_refused(tmp_path, make):
    assert refusal(ExportFailed, written, module(value=make(torch.ones(2, dtype=torch.complex64))), tmp_path) == (
        "`value` is a conjugated or negated view, which a bundle cannot hold; give it values of its own "
        "(`.resolve_conj().resolve_neg()`)"
    )


def test_buffers_that_are_not_persistent_are_stored_apart(tmp_path, mapped):
    holder = module(weight=nn.Parameter(torch.ones(2)))
    holder.register_buffer("cache", torch.arange(3.0), persistent=False)
    restored = round_trip(holder, tmp_path, mapped=mapped)
    assert restored["cache"].tolist() == [0.0, 1.0, 2.0]
    with safe_open(tmp_path / "weights/constants.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["cache"]


def test_state_above_the_limit_is_split_with_the_index_of_hugging_face(tmp_path, mapped):
    holder = module(**{name: nn.Parameter(torch.full((8,), float(index))) for index, name in enumerate("abc")})
    restored = round_trip(holder, tmp_path, mapped=mapped, shard_nbytes=64)
    index = json.loads((tmp_path / "weights/model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 96},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    assert [restored[name][0].item() for name in "abc"] == [0.0, 1.0, 2.0]


def test_training_in_place_never_reaches_the_file(tmp_path, mapped):
    bundle = written(module(weight=nn.Parameter(torch.ones(1000))), tmp_path)
    path = tmp_path / "weights/model.safetensors"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    tensor = load_tensors(bundle, bundle.manifest.state, Environment().form, mapped=mapped)["weight"]
    tensor.sub_(7)
    assert tensor[0] == -6
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert load_tensors(bundle, bundle.manifest.state, Environment().form, mapped=mapped)["weight"][0] == 1


def test_file_that_is_compared_in_many_parts_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_PART_NBYTES", 4096)
    bundle = written(module(weight=torch.arange(1 << 20)), tmp_path)
    bundle.compared_by_readers = frozenset([bundle.manifest.state[0].file])
    restored = load_tensors(bundle, bundle.manifest.state, Environment().form, mapped=False)
    assert torch.equal(restored["weight"], torch.arange(1 << 20))


def test_file_is_mapped_by_default_if_nobody_can_change_it(tmp_path):
    bundle, path = written(module(weight=torch.ones(3)), tmp_path), tmp_path / "weights/model.safetensors"
    for immutable in (False, True):
        if immutable and subprocess.run(["chattr", "+i", path], check=False).returncode:
            pytest.skip("no right or no file system to make a file immutable")
        restored = load_tensors(bundle, bundle.manifest.state, Environment().form)
        subprocess.run(["chattr", "-i", path], check=False)
        assert (str(path) in Path("/proc/self/maps").read_text()) == immutable
        assert restored["weight"].tolist() == [1, 1, 1]


def adding(self, x):
    self.whole.add_(1)
    return x + self.part


def test_export_leaves_overlapping_buffers_overlapping_in_the_model_and_in_the_bundle(new_bundle):
    base = torch.arange(6.0)
    model = module(adding, whole=base, part=base[::2])
    loaded = aotexport_runtime.load(new_bundle(model, torch.zeros(3)))
    for overlapping in (model, loaded, copy.deepcopy(loaded)):
        assert overlapping.part.stride() == (2,)
        assert overlapping(torch.zeros(3)).tolist() == [1.0, 3.0, 5.0]
