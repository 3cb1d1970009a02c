"""Functions of torch that generated code calls in place of operators: the same operators with the same arguments."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: TID251 (traces above autograd)

from aotexport_runtime.execution.ops import _DIRECT, direct, resolve

X, Y = torch.linspace(0.5, 2, 9).reshape(3, 3), torch.linspace(3, 1, 9).reshape(3, 3)
ROW, INDEX = X[0].clone(), torch.tensor([2, 0])
CUBE = torch.linspace(-1, 1, 16).reshape(1, 4, 2, 2)
KERNELS = torch.ones(2, 4, 1, 1)


def given(*args, **kwargs):
    return args, kwargs


STRIDED = {"dtype": torch.float64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
ARGUMENTS = {
    "addcmul.default": (X, X, Y),
    "addmm.default": (ROW, X, Y),
    "argmax.default": (X, 1, True),
    "baddbmm.default": (X[None], X[None], Y[None]),
    "batch_norm.default": (X, ROW, ROW, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, False),
    "bmm.default": (X[None], Y[None]),
    "cat.default": ([X, Y], 1),
    "chunk.default": (X, 2, 1),
    "clamp.default": (X, 1.5, None),
    "conv1d.default": (CUBE[0], torch.ones(2, 2, 1), None, [1], [0], [1], 1),
    "conv2d.default": (CUBE, KERNELS, None, [1, 1], [1, 0], [1, 1], 1),
    "dropout.default": (X, 0.5, True),
    "embedding.default": (X, INDEX, -1, False, False),
    "eq.Scalar": (X, 2),
    "expand.default": (ROW, [2, 3]),
    "flatten.using_ints": (CUBE, 1, -1),
    "gather.default": (X, 1, INDEX[None]),
    "gelu.default": (X,),
    "index_select.default": (X, 1, INDEX),
    "layer_norm.default": (X, [3], ROW, None, 1e-5, False),
    "linear.default": (X, Y, ROW),
    "log_softmax.int": (X, 1, torch.float64),
    "masked_fill.Scalar": (X, X > 1, -1.0),
    "max.dim": (X, 1, True),
    "max_pool2d.default": (CUBE, [2, 1], [1, 1], [0, 0], [1, 1], True),
    "mean.dim": (X, [1], True),
    "native_layer_norm.default": (X, [3], ROW, None, 1e-5),
    "permute.default": (X, [1, 0]),
    "pow.Tensor_Scalar": (X, 2),
    "reshape.default": (X, [9]),
    "rms_norm.default": (X, [3], ROW, 1e-5),
    "roll.default": (X, [1], [-1]),
    "scaled_dot_product_attention.default": (CUBE, CUBE, CUBE, None, 0.0, True),
    "select.int": (X, 1, -1),
    "softmax.int": (X, 1, torch.float64),
    "squeeze.dim": (X[None], 0),
    "stack.default": ([X, Y], 1),
    "sum.dim_IntList": (X, [1], True),
    "transpose.int": (X, 0, 1),
    "unbind.int": (X, 1),
    "unsqueeze.default": (X, 1),
    "view.default": (X, [9]),
    "where.self": (X > 1, X, Y),
}
ARGUMENTS = {name: given(*arguments) for name, arguments in ARGUMENTS.items()} | {
    "__and__.Tensor": given(X > 1, Y > 1),
    "arange.default": given(5, **STRIDED),
    "arange.start": given(2, 5, **STRIDED),
    "bitwise_not.default": given(X > 1),
    "contiguous.default": given(X.t(), memory_format=torch.contiguous_format),
    "cumsum.default": given(X, 1, dtype=torch.float64),
    "full.default": given([2, 3], 1.5, **STRIDED),
    "full_like.default": given(X, 1.5, **STRIDED),
    **{f"{name}.Scalar": given(X, 1) for name in ("ge", "gt", "le", "lt", "ne")},
    "index_add.default": given(X, 1, INDEX, Y[:, :2], alpha=2),
    "new_ones.default": given(X, [2, 3], **STRIDED),
    "new_zeros.default": given(X, [2, 3], **STRIDED),
    "ones.default": given([2, 3], **STRIDED),
    "ones_like.default": given(X, **STRIDED, memory_format=torch.preserve_format),
    "repeat.default": given(X, [2, 1]),
    "to.device": given(X, torch.device("cpu"), torch.float64, False, True, memory_format=torch.contiguous_format),
    "to.dtype": given(X, torch.float64, False, True, memory_format=torch.contiguous_format),
    "where.ScalarOther": given(X > 1, X, 0.5),
    "zeros.default": given([2, 3], **STRIDED),
    "zeros_like.default": given(X, **STRIDED, memory_format=torch.preserve_format),
}
"""What some operators are called with; others take one matrix, or two."""


def arguments_of(name):
    operator = resolve(name, None, frozenset())
    taken = [argument for argument in operator._schema.arguments if not argument.has_default_value()]
    return ARGUMENTS.get(name.removeprefix("aten::"), ((X.clone(), Y)[: len(taken)], {}))


def calls(function, args, kwargs):
    """Return the operators that a call reaches above autograd, each with its arguments, and its results."""
    torch.manual_seed(0)
    graph = make_fx(lambda: function(*args, **kwargs), pre_dispatch=True)().graph
    nodes = [(node.target, node.args, node.kwargs) for node in graph.nodes if node.op == "call_function"]
    return [(target, args, kwargs) for target, args, kwargs in nodes if "getitem" not in str(target)]


@pytest.mark.parametrize("name", sorted(_DIRECT))
def test_direct_call_reaches_the_operator_with_its_arguments(name):
    function, operator = direct(name), resolve(name, None, frozenset())
    args, kwargs = arguments_of(name)
    assert function is not None
    torch.manual_seed(0)
    expected = operator(*args, **kwargs)
    torch.manual_seed(0)
    torch.testing.assert_close(function(*args, **kwargs), expected, rtol=0, atol=0)
    assert str(calls(function, args, kwargs)) == str(calls(operator, args, kwargs))
    assert [target for target, _, _ in calls(function, args, kwargs)] == [operator]
