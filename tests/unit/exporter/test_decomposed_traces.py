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

# The compiler makes one `addmm` of a product and a sum, and leaves out what the sum scales by.
scaled = lambda x, y: [torch.add(x @ x, y, alpha=2), torch.lerp(x @ x, y, 0.25), torch.add(x @ x, y)]
graph = trace_decomposed(scaled, [mode.from_tensor(torch.rand(3, 3)) for _ in range(2)], mode).graph
sums = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
assert len(sums) == 3 and not any(node.kwargs for node in sums)
"""


def test_pooling_and_scaled_sums_are_decomposed_in_a_process_that_has_compiled_nothing(tmp_path):
    assert run_script(None, cwd=tmp_path, text=_POOLING).stderr == ""
