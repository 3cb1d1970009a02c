"""Results that a fake tensor mode knows from an earlier call: as torch makes them, on the memory that they view."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: TID251

from aotexport.torch_internals.symbolic_memo import made_quickly

OPERATIONS = {
    "transpose": lambda x: x.transpose(0, 1),
    "slice": lambda x: x[:, 1:, ::2],
    "view": lambda x: x.view(x.size(0), -1),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1),
    "detach": lambda x: x.detach(),
    "sum": lambda x: x.sum(1),
    "relu of a transposed tensor": lambda x: x.transpose(0, 2).relu(),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "cast": lambda x: x.to(torch.float64),
    "bits": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.complex(x, x).conj(),
    "imaginary part": lambda x: torch.complex(x, x).conj().imag,
    "largest": lambda x: x.max(1),
    "in place": lambda x: x.clone().add_(1),
    "flag": lambda x: x.isnan(),
}


def fake(mode, requires_grad=False):
    dynamic, static = DimDynamic.DYNAMIC, DimDynamic.STATIC
    context = StatelessSymbolicContext(dynamic_sizes=[dynamic, dynamic, static])
    return mode.from_tensor(torch.zeros(3, 5, 8, requires_grad=requires_grad), symbolic_context=context)


def described(tensor, source):
    """Return what tells tensors apart, sizes as expressions."""
    memory = tensor.untyped_storage()
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    is_source = memory._cdata == source.untyped_storage()._cdata
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_contiguous()
    hints = [number if isinstance(number, int) else number.node.hint for number in (*numbers, memory.nbytes())]
    return tensor.dtype, tensor.device, list(map(str, numbers)), hints, is_source, flags


@pytest.fixture
def mode():
    return FakeTensorMode(shape_env=ShapeEnv())


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_known_result_is_the_one_that_torch_makes(mode, name, requires_grad):
    x = fake(mode, requires_grad)

    def results():
        made = OPERATIONS[name](x)
        return [described(each, x) for each in (made if isinstance(made, tuple) else (made,))]

    with mode:
        # The first call computes; the others know its result.
        expected, *_ = (results() for _ in range(3))
        with made_quickly(mode.shape_env):
            assert [results() for _ in range(3)] == [expected] * 3


def test_writes_to_a_known_view_count_as_writes_to_its_source(mode):
    x = fake(mode)
    with mode, made_quickly(mode.shape_env):
        view = [x.transpose(0, 1) for _ in range(2)][-1]
        before = x._version
        view.add_(1)
    assert x._version == before + 1
