"""What `inspect --kernels` shows: resources as NVIDIA's own tool reads them, what was fused, and where it came from."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from click.testing import CliRunner
from torch import nn

import aotexport
from aotexport.lower.cuda import compile as compilation
from aotexport.lower.cuda.compile import compile_kernels
from aotexport.lower.targets import CUDA_ARCHITECTURES
from aotexport_runtime import open_bundle
from aotexport_runtime.cli.inspect import inspect
from aotexport_runtime.inspection.kernels import kernel_facts, resources
from tests.cuda.test_compile import DOUBLED

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
GOLDEN = Path(__file__).parents[1] / "golden/v1.0/kernels/bundle"


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    compiled = compile_kernels([DOUBLED], CUDA_ARCHITECTURES, cache=tmp_path_factory.mktemp("cache"))
    return {job.architecture: binary.code for job, binary in compiled.binaries.items()}


@pytest.mark.parametrize("architecture", CUDA_ARCHITECTURES)
def test_resources_are_those_that_cuobjdump_shows(binaries, architecture, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binaries[architecture])
    shown = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = resources(binaries[architecture])
    assert found is not None
    assert re.search(r"REG:(\d+) STACK:(\d+)", shown).groups() == (f"{found.registers}", f"{found.stack_nbytes}")


@pytest.mark.parametrize("code", [b"", b".version 8.0", b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_machine_code_has_no_resources(code):
    assert resources(code) is None


def test_kernels_of_a_program_are_shown_with_launches_and_code():
    facts = kernel_facts(open_bundle(GOLDEN), "train")
    assert [kernel.launches for kernel in facts] == [{"train/forward": 1}, {"train/backward": 1}]
    assert facts[1].operators == ("aten::mul", "aten::tanh", "aten::tanh_backward")
    assert [code.architecture for code in facts[0].code] == ["sm_80", "ptx"]
    assert facts[0].code[1].resources is None


def test_command_prints_kernels_as_text_and_json():
    text = CliRunner().invoke(inspect, [str(GOLDEN), "--kernels"]).stdout
    assert "triton_poi_fused_mul_tanh" in text
    assert "1 in train/backward" in text
    printed = json.loads(CliRunner().invoke(inspect, [str(GOLDEN), "--kernels", "--json"]).stdout)
    assert printed[0]["code"][0]["resources"]["registers"] > 0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return torch.tanh(self.norm(x))


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))

    def exported(**options):
        path = tmp_path / "bundle"
        args = (torch.randn(4, 8),)
        aotexport.export(
            Scaled(), args, output=path, targets=("cuda",), verify=False, source_root=Path(__file__).parent, **options
        )
        return open_bundle(path)

    return exported


def test_kernels_say_what_was_fused_and_what_lines_it_came_from(bundle):
    (kernel,) = kernel_facts(bundle(programs="infer"))
    line = Scaled.forward.__code__.co_firstlineno + 1
    assert kernel.operators == ("aten::native_layer_norm", "aten::tanh")
    assert kernel.lines == (f"test_kernel_facts.py:{line}",)


def test_stripped_bundle_has_no_lines(bundle):
    (kernel,) = bundle(programs="infer", strip=True).kernels("cuda").kernels
    assert kernel.lines == ()
