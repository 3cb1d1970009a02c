"""The fast path of a call by ONNX Runtime: it serves what needs no care, as its fallback would."""

import copy

import numpy as np
import pytest
import torch
from torch.export import Dim

import aotexport_runtime
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.module.onnx_module import compose_onnx

TURNED_AWAY = object()
ROWS = Dim("rows", min=2, max=5)


def _model(x, ids, scale=None):
    return {"sum": (x.sum(), x + ids.unsqueeze(1)), "ids": ids * 2}


@pytest.fixture(scope="module")
def plan(new_bundle):
    args = torch.ones(3, 4), torch.arange(3)
    sizes = ({0: ROWS}, {0: ROWS})
    bundle = open_bundle(new_bundle(_model, *args, programs="infer", dynamic_shapes=sizes, onnx=True))
    options = aotexport_runtime.OnnxRuntime()
    return compose_onnx(bundle, bundle.program("infer"), bundle.manifest.onnx[0], options, {})


@pytest.fixture(scope="module")
def fast(plan):
    plan = copy.copy(plan)
    plan._check_and_run = lambda args, kwargs: TURNED_AWAY
    return plan.fast_path()


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_usual_call_is_served_as_by_the_fallback(plan, fast, rows, kind):
    x, ids = np.linspace(-1, 1, 4 * rows, dtype=np.float32).reshape(rows, 4), np.arange(rows)
    args = (x, ids) if kind == "arrays" else (torch.from_numpy(x), torch.from_numpy(ids))
    expected = plan._check_and_run(args, {})
    for got in (fast(args, {}), fast((), {"ids": args[1], "x": args[0]})):
        assert list(got) == ["sum", "ids"]
        for a, b in zip((*got["sum"], got["ids"]), (*expected["sum"], expected["ids"]), strict=True):
            assert type(a) is type(b) is type(args[0])
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


X, IDS = torch.ones(3, 4), torch.arange(3)


@pytest.mark.parametrize(
    "args",
    [
        (X.double(), IDS),
        (X.t().contiguous().t(), IDS),
        (X.clone().requires_grad_(), IDS),
        (torch.ones(6, 4), torch.arange(6)),
        (X, torch.arange(2)),
        (X, IDS.numpy()),
        (X.numpy().astype(">f4"), IDS.numpy()),
        (X,),
        (torch.ones(3, 4, device="meta"), IDS),
    ],
)
def test_call_that_needs_care_is_turned_away(fast, args):
    assert fast(args, {}) is TURNED_AWAY
    for kwargs in ({"ids": IDS}, {"ids": IDS, "x": X}, {"x": X, "more": IDS}):
        assert fast((X,), kwargs) is TURNED_AWAY
    assert fast((), {"x": X, "more": IDS}) is TURNED_AWAY
