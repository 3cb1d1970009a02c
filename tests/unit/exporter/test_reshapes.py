"""Views and reshapes of dynamic sizes that are 1 in the example."""

import pytest
import torch
from torch import _refs
from torch._dynamo.source import ConstantSource  # noqa: TID251
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # noqa: TID251

from aotexport.torch_internals.general_sizes import general_sizes_kept


@pytest.fixture
def environment():
    return ShapeEnv(specialize_zero_one=False, duck_shape=False)


def rounded(environment, name):
    """Return a size that is 1 for the example's, computed as that of a resized image."""
    source = ConstantSource(name)
    symbol = environment.create_symbol(2, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = environment.create_symintnode(symbol, hint=2, source=source)
    return (torch.sym_max(torch.sym_int(torch.sym_float(size) * 0.5), 1) - 1) // 128 + 1


def test_view_that_needs_a_size_of_one_drops_its_axis_once(environment, monkeypatch):
    drop, dropped = _refs.squeeze, []

    def squeeze(tensor, dim=None):
        dropped.append(dim)
        assert len(dropped) < 5, "the axis is never gone"
        return drop(tensor, dim)

    monkeypatch.setattr(_refs, "squeeze", squeeze)
    height, width = (rounded(environment, name) for name in ("height", "width"))
    with FakeTensorMode(shape_env=environment), general_sizes_kept(lambda condition: None):
        spread = torch.empty(width).expand(height, width)
        view = _refs._reshape_view_helper(spread, [height * width], allow_copy=False)
    assert view.dim() == 1
    assert any(guard.expr.has(width.node.expr) for guard in environment.guards)
