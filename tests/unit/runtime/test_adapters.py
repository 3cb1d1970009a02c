"""Operators that a release of torch lacks, by those that it has."""

import pytest
import torch

from aotexport_runtime.errors import CheckFailed, NotSupported
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.ops import ADAPTERS
from aotexport_runtime.execution.preconditions.table import guarded
from tests.refusals import refusal

SQUARE = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]], dtype=torch.float64)
WIDE = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2).cos()
CALLS = {"cholesky.default": [(SQUARE,), (SQUARE, True)], "qr.default": [(WIDE,), (WIDE, False), (WIDE.T,)]}
"""Calls of each operator that has an adapter."""


def values_and_gradients(function, args):
    """Return results, and the gradient of the first argument."""
    first = args[0].clone().requires_grad_()
    results = function(first, *args[1:])
    results = results if isinstance(results, tuple) else (results,)
    is_smooth = all(result.shape[0] <= args[0].shape[1] for result in results)
    (gradient,) = torch.autograd.grad(sum(each.cos().sum() for each in results), [first]) if is_smooth else (None,)
    return (*results, gradient)


def without(monkeypatch, name):
    """Take operator `base.overload` out of torch, as a later release does."""
    base = name.partition(".")[0]
    kept = {"ops": type("Ops", (), {"aten": object()}), "linalg": torch.linalg, "__version__": "9"}
    monkeypatch.setattr(ops, "torch", type("Torch", (), kept))
    return f"aten::{base}.default"


@pytest.mark.parametrize(("name", "args"), [(name, args) for name, calls in CALLS.items() for args in calls])
@pytest.mark.filterwarnings("ignore:torch.(cholesky|qr) is deprecated")
def test_adapter_gives_the_values_and_gradients_of_the_operator(name, args, monkeypatch):
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        pytest.skip(f"torch {torch.__version__} has no `{name}` to compare with")
    expected = values_and_gradients(getattr(packet, overload), args)
    adapter = ops.resolve(without(monkeypatch, name), None, frozenset())
    found = values_and_gradients(adapter, args)
    assert adapter is ADAPTERS[name]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_operator_without_an_adapter_is_refused_by_name(monkeypatch):
    without(monkeypatch, "mm.default")
    said = refusal(NotSupported, ops.overload, "aten::mm.default", None, frozenset())
    assert said == "torch 9 has no operator `aten::mm.default`; install the torch that the bundle was exported with"


class LaterCdist:
    """`_cdist_backward` as torch has it from 2.15."""

    _schema = torch._C.parse_schema(  # noqa: TID251 (no public name makes a signature)
        "aten::_cdist_backward(Tensor grad_output, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"
    )

    def __call__(self, *args):
        """Call the operator."""
        return torch.ops.aten._cdist_backward.default(*args)


def test_operator_with_a_renamed_argument_is_called_and_checked_as_before():
    x1, x2 = WIDE, WIDE + 1
    args = (torch.ones(3, 3, dtype=torch.float64), x1, x2, 2.0, torch.cdist(x1, x2))
    later = guarded("_cdist_backward.default", LaterCdist())
    assert torch.equal(later(*args), torch.ops.aten._cdist_backward.default(*args))
    with pytest.raises(CheckFailed):
        later(args[0][:1], *args[1:])
