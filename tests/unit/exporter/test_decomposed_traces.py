"""Traces of the operators that torch's compiler fuses."""

from tests.forked import run_script

_POOLING = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aotexport.torch_internals.compiler import trace_decomposed

mode = FakeTensorMode()
pool = lambda image: list(torch.ops.aten.max_pool2d_with_indices.default(image, [3, 3], [2, 2]))
graph = trace_decomposed(pool, [mode.from_tensor(torch.rand(1, 1, 8, 8))], mode).graph
assert "_low_memory_max_pool_with_offsets" in str(graph)
"""


def test_max_pooling_is_decomposed_in_a_process_that_has_compiled_nothing(tmp_path):
    assert run_script(None, cwd=tmp_path, text=_POOLING).stderr == ""
