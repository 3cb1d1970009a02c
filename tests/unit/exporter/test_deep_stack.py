"""Long chains of operators on the usual stack."""

import subprocess
import sys

import pytest

from aotexport.process.blocks import STACK_NBYTES, deep_stack

resource = pytest.importorskip("resource", reason="limits of a Unix process")

_CHAIN = """
import resource, sys
import torch, aotexport
resource.setrlimit(resource.RLIMIT_STACK, (700 << 10, resource.getrlimit(resource.RLIMIT_STACK)[1]))
def chain(x):
    for _ in range(10_000):
        x = x.sin()
    return x
aotexport.export(chain, (torch.randn(4, requires_grad=True),), output=sys.argv[1], programs=("train",), verify=False)
"""


def test_stack_is_deep_for_as_long_as_the_block():
    before = resource.getrlimit(resource.RLIMIT_STACK)
    with deep_stack():
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        assert hard == before[1]
        assert soft in (resource.RLIM_INFINITY, hard) or soft >= STACK_NBYTES
    assert resource.getrlimit(resource.RLIMIT_STACK) == before


@pytest.mark.slow
def test_chain_longer_than_the_usual_stack_is_exported(tmp_path):
    subprocess.run([sys.executable, "-c", _CHAIN, str(tmp_path / "bundle")], check=True)
    assert (tmp_path / "bundle" / "bundle.json").exists()
