"""What compiled code says of itself, by NVIDIA's own tool, is what launches are packed by, on every architecture."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from aotexport.lower.cuda.compile import Job, compile_kernels, parameter_of
from aotexport.lower.cuda.sources import Candidate, KernelSource
from aotexport.lower.targets import check_targets
from aotexport_runtime.schema.targets import PointerParameter

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ARCHITECTURES = check_targets(["cuda"]).cuda

TEXT = """import triton
import triton.language as tl

@triton.jit
def mixed(x, flag, small, out, n, wide, half, single, double, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < n) * FACTOR + small + wide + half + single + double
    tl.store(out + index, tl.where(flag, value, 0.0), index < n)
"""
MIXED = KernelSource(
    name="mixed",
    text=TEXT,
    signature={
        "x": "*fp32", "flag": "i1", "small": "i16", "out": "*fp32", "n": "i32", "wide": "i64", "half": "fp16",
        "single": "fp32", "double": "fp64", "BLOCK": "constexpr", "FACTOR": "constexpr",
    },
    divisible=("x", "n"),
    arguments=("x", "flag", "small", "out", "n", "wide", "half", "single", "double"),
    grid_arguments=(),
    candidates=(
        Candidate({"BLOCK": 128, "FACTOR": 2.0}, {"num_warps": 4, "num_stages": 1}, ("n", 1, 1)),
        Candidate({"BLOCK": 64, "FACTOR": 2.0}, {"num_warps": 2, "num_stages": 1}, ("n", 1, 1)),
    ),
)  # fmt: skip
SCRATCH_AND_PROFILE = [8, 8]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_kernels([MIXED], ARCHITECTURES, cache=tmp_path_factory.mktemp("kernels"))


def nbytes(parameter):
    """Return how many bytes of a launch's slot the driver is to read."""
    if isinstance(parameter, PointerParameter):
        return 8
    return max(8, int(re.sub(r"[a-z]+", "", parameter.type))) // 8


@pytest.mark.parametrize("candidate", [0, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_code_takes_the_recorded_parameters(architecture, candidate, compiled, tmp_path):
    (tmp_path / "code").write_bytes(compiled.binaries[Job("mixed", candidate, architecture)].code)
    command = [CUOBJDUMP, "-elf", tmp_path / "code"]
    described = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert f".nv.info.{MIXED.name}" in described
    found = re.findall(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)", described)
    sizes = {int(ordinal, 16): int(size, 16) for ordinal, _, size in found}
    recorded = [nbytes(parameter_of(MIXED, name)) for name in MIXED.arguments]
    assert [sizes[ordinal] for ordinal in range(len(sizes))] == recorded + SCRATCH_AND_PROFILE
    threads = re.search(r"EIATTR_REQNTID\s+Format:\s+EIFMT_SVAL\s+Value:\s+0x(\w+) 0x1 0x1", described)
    assert threads is not None
    assert int(threads[1], 16) == 32 * MIXED.candidates[candidate].options["num_warps"]
