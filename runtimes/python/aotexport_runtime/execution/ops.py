"""Operators by name, in the running torch.

Threat: a bundle names an operator that reads a file, touches memory unchecked, or runs code. Defence: lists in
`allowed/`, and namespaces that the caller of `load` names. `validate/types.py` checks arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from aotexport_runtime.allowed.operators import BUILTINS, allowed_aten_operators
from aotexport_runtime.allowed.signatures import is_compatible
from aotexport_runtime.errors import BundleInvalid, NotSupported
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.validate.arguments import graphs_of

_OVERLOAD = type(torch.ops.aten.add.Tensor)


def resolve(name: str, captured_schema: str | None, namespaces: frozenset[str]) -> Callable[..., Any]:
    """Return an operator as `overload` does, with checks of what its kernel trusts."""
    function = overload(name, captured_schema, namespaces)
    namespace, _, rest = name.partition("::")
    if namespace != "aten" or name in _PLAIN or not isinstance(function, _OVERLOAD):
        return function
    from aotexport_runtime.execution.preconditions.table import guarded

    return guarded(rest, function)


def overload(name: str, captured_schema: str | None, namespaces: frozenset[str]) -> Callable[..., Any]:
    """Return operator `name` (`namespace::base.overload`) of the running torch.

    `captured_schema`: the schema it was captured with; None: not compared. `namespaces`: those beside `aten` that the
    caller of `load` allowed.

    Raises:
        BundleInvalid: `name` is neither on the list nor in one of `namespaces`.
        NotSupported: this torch lacks the operator, or has it with another signature.
    """
    namespace, _, rest = name.partition("::")
    base, _, overloaded = rest.partition(".")
    is_listed = rest in allowed_aten_operators() if namespace == "aten" else namespace in namespaces
    if not is_listed and name not in BUILTINS:
        raise BundleInvalid(
            f"operator `{name[:80]}` is not on the list of operators that a bundle may call",
            check="operator-unlisted/aten",
        )
    if namespace == "python":
        return BUILTINS[name]
    packet = getattr(getattr(torch.ops, namespace), base, None)
    function = getattr(packet, overloaded or "default", None)
    if not isinstance(function, _OVERLOAD):
        if namespace == "aten" and rest in ADAPTERS:
            return ADAPTERS[rest]
        if namespace == "aten":
            here = f"torch {torch.__version__}"
            raise NotSupported(f"{here} has no operator `{name}`; install the torch that the bundle was exported with")
        raise NotSupported(
            f"operator `{name}` is not registered: import the package that registers namespace `{namespace}` before "
            "loading"
        )
    current = str(function._schema)
    if captured_schema is not None and current != captured_schema and not is_compatible(captured_schema, current):
        raise NotSupported(
            f"operator `{name}` has another signature in torch {torch.__version__}.\n"
            f"  captured: {captured_schema}\n  here:     {current}\n"
            "Run the bundle with the torch it was exported with, or export it again"
        )
    return function


def _qr(self: torch.Tensor, some: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = torch.linalg.qr(self, mode="reduced" if some else "complete")
    return q, r


ADAPTERS: dict[str, Callable[..., Any]] = {
    # Gone from torch 2.15.
    "cholesky.default": lambda self, upper=False: torch.linalg.cholesky(self, upper=upper),
    "qr.default": _qr,
}
"""Operators of the operator set that a release of torch has no longer, by those that it has.

Others that differ by their signature alone are in `allowed/signatures.py`; all others are refused at load.
"""


def check_operators(graphs: Iterable[Graph], namespaces: frozenset[str]) -> None:
    """Refuse operators that the running torch lacks, or has with other signatures: `NotSupported` names each."""
    called: set[tuple[str, str]] = set()
    for each in (each for graph in graphs for each in graphs_of(graph)):
        used = {node.op for node in each.nodes}
        called |= {signature for signature in each.schemas.items() if signature[0] in used}
    reasons: list[str] = []
    for op, schema in sorted(called):
        try:
            overload(op, schema, namespaces)
        except NotSupported as error:
            reasons.append(str(error))
    if reasons:
        raise NotSupported("\n".join(reasons))


_DIRECT = frozenset(
    f"aten::{name}"
    for name in (
        *("__and__.Tensor", "abs.default", "add.Tensor", "add_.Tensor", "addcmul.default", "addmm.default"),
        *("amax.default", "arange.default", "arange.start", "argmax.default", "baddbmm.default"),
        *("batch_norm.default", "bitwise_not.default", "bmm.default", "cat.default", "chunk.default"),
        *("clamp.default", "clone.default", "contiguous.default", "conv1d.default", "conv2d.default"),
        *("copy_.default", "cos.default", "cumsum.default", "detach.default", "div.Tensor", "div_.Tensor"),
        *("dropout.default", "eq.Scalar", "eq.Tensor", "exp.default", "expand.default", "flatten.using_ints"),
        *("full.default", "full_like.default", "gather.default", "ge.Scalar", "ge.Tensor", "gelu.default"),
        *("gt.Scalar", "gt.Tensor", "index_add.default", "index_select.default", "layer_norm.default", "le.Scalar"),
        *("le.Tensor", "linear.default", "log.default", "log_softmax.int", "lt.Scalar", "lt.Tensor"),
        *("masked_fill.Scalar", "matmul.default", "max.dim", "max_pool2d.default", "maximum.default", "mean.default"),
        *("mean.dim", "minimum.default", "mm.default", "mul.Tensor", "mul_.Tensor", "native_layer_norm.default"),
        *("ne.Scalar", "neg.default", "new_ones.default", "new_zeros.default", "ones.default", "ones_like.default"),
        *("permute.default", "pow.Tensor_Scalar", "relu.default", "relu_.default", "repeat.default"),
        *("reshape.default", "rms_norm.default", "roll.default", "rsqrt.default", "select.int", "sigmoid.default"),
        *("sin.default", "softmax.int", "sqrt.default", "squeeze.dim", "stack.default", "sub.Tensor", "sum.default"),
        *("sum.dim_IntList", "t.default", "tanh.default", "tanh_.default", "to.device", "to.dtype", "transpose.int"),
        *("unbind.int", "unsqueeze.default", "view.default", "where.ScalarOther", "where.self", "zeros.default"),
        "zeros_like.default",
    )
)
"""Operators without preconditions that functions of torch call with the same arguments, at half the cost."""

POSITIONAL = {"aten::to.dtype": 4, "aten::to.device": 5}
"""The most arguments that torch's functions take by position, where their operators take more."""

_PLAIN = _DIRECT | {"aten::threshold_backward.default"}
"""Operators without preconditions that most bundles have, which need no look into the table."""

_DIRECT_UNGUARDED = frozenset(
    f"aten::{name}" for name in ("addmm.out", "as_strided.default", "bmm.out", "empty_strided.default", "mm.out")
)
"""The same of operators that have preconditions."""

_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)


@cache
def direct(name: str, *, unguarded: bool = False) -> Callable[..., Any] | None:
    """Return torch's function or method that calls an operator, `unguarded` one with preconditions too, or None."""
    if name not in _DIRECT and not (unguarded and name in _DIRECT_UNGUARDED):
        return None
    base = name.removeprefix("aten::").partition(".")[0]
    found = (getattr(owner, base, None) for owner in (torch, torch.Tensor, torch.nn.functional))
    # Another release may have a Python function of this name with a meaning of its own.
    return next((function for function in found if isinstance(function, _BUILT_IN)), None)
