"""Kernels compiled in worker processes: code, cache, determinism, and what becomes of a compiler that fails or dies."""

import dataclasses
import re
import shutil
import subprocess

import pytest

from aotexport.lower.cuda import compile as compilation
from aotexport.lower.cuda.compile import Job, compile_kernels, library_files
from aotexport.lower.cuda.sources import Candidate, KernelSource
from aotexport_runtime.schema.codec import decode_record
from aotexport_runtime.schema.targets import KernelLibrary

TEXT = """import triton
import triton.language as tl

@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, index < n) * 2, index < n)
"""
OPTIONS = {"num_warps": 4, "num_stages": 1}
DOUBLED = KernelSource(
    name="doubled",
    text=TEXT,
    signature={"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    divisible=("x", "out"),
    arguments=("x", "out", "n"),
    grid_arguments=(),
    candidates=(Candidate(constants={"BLOCK": 128}, options=OPTIONS, grid=("n", 1, 1)),),
)
WRONG = dataclasses.replace(DOUBLED, name="wrong", text=TEXT.replace("doubled", "wrong").replace("* 2", "* nobody"))


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Return two empty directories; not to be written to by tests."""
    return tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")


@pytest.fixture(scope="module")
def built(caches):
    """Return the files of a kernel, compiled twice in different places."""
    found = []
    for cache in caches:
        compiled = compile_kernels([DOUBLED], ["sm_80", "sm_120"], cache=cache)
        found.append((compiled, library_files([DOUBLED], compiled, ["sm_80", "sm_120"])))
    return found


def test_kernel_has_code_for_every_architecture(built):
    compiled, files = built[0]
    library = decode_record(files["kernels.json"], KernelLibrary, where="kernels.json")
    (kernel,) = library.kernels
    assert [binary.architecture for binary in kernel.candidates[0].binaries] == ["sm_80", "sm_120", "ptx"]
    assert compiled.binaries[Job("doubled", 0, "sm_80")].code.startswith(b"\x7fELF")
    assert files["sources/doubled.py"].decode() == TEXT


def test_code_takes_the_recorded_parameters_and_two_more(built):
    ptx = built[0][0].binaries[Job("doubled", 0, "sm_80")].ptx.decode()
    assert re.findall(r"\.param \.(u\d+)", ptx)[:5] == ["u64", "u64", "u32", "u64", "u64"]
    assert ".reqntid 128" in ptx


def test_text_for_newer_devices_is_of_an_old_version(built):
    assert built[0][0].binaries[Job("doubled", 0, "sm_80")].ptx.startswith(b".version 8.0\n.target sm_80\n")


def test_same_kernel_gives_the_same_bytes(built):
    assert built[0][1] == built[1][1]


def test_code_holds_no_path(built):
    for binary in built[0][0].binaries.values():
        assert b"/tmp" not in binary.code
        assert b".loc" not in binary.ptx


def test_kernel_is_taken_from_the_cache(built, caches, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    assert compile_kernels([DOUBLED], ["sm_80", "sm_120"], cache=caches[0]) == built[0][0]


def test_damaged_cache_entry_is_compiled_again_and_other_kernels_that_fail_cost_only_themselves(
    built, caches, tmp_path
):
    shutil.copytree(caches[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / compilation._description(DOUBLED, 0, "sm_80")["key"]).write_bytes(b"cut off")
    fatal = "import os\nos.abort()\n"
    dying = dataclasses.replace(DOUBLED, name="dying", text=fatal + TEXT.replace("doubled", "dying"))
    reported = []
    compiled = compile_kernels(
        [WRONG, dying, DOUBLED], ["sm_80"], cache=tmp_path, progress=lambda *p: reported.append(p)
    )
    job = Job("doubled", 0, "sm_80")
    assert compiled.binaries == {job: built[0][0].binaries[job]}
    assert "nobody" in compiled.failures.pop(Job("wrong", 0, "sm_80"))
    assert compiled.failures == {Job("dying", 0, "sm_80"): "the compiler's process died (exit code -6)"}
    assert reported[-1] == (3, 3)


def test_key_of_compiled_code_tells_architectures_apart():
    assert len({compilation._description(DOUBLED, 0, name)["key"] for name in ("sm_80", "sm_90", "sm_120")}) == 3
