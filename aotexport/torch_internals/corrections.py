"""Correct errors of torch's compiler for the time of a block; written for torch 2.13.

Torch's compiler is imported late, which takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aotexport.process.patches import Patch, patched

aten: Any = torch.ops.aten

_LEAST_OF_32_BITS = torch.iinfo(torch.int32).min


@contextlib.contextmanager
def pools_by_torch() -> Iterator[None]:
    """Leave gradients of average pools that the compiler computes wrongly to torch's operators.

    The compiler's code divides by the whole window where the window reaches past the padding (`ceil_mode`); torch
    counts only the elements inside.
    """
    from torch._inductor import lowering

    fallbacks = {
        aten.avg_pool2d_backward.default: lowering.fallback_avg_pool2d_backward,
        aten.avg_pool3d_backward.default: lowering.fallback_avg_pool3d_backward,
    }
    reason = "Count the elements inside of the padding in gradients of average pools"
    lowerings: Any = lowering.lowerings
    with patched(
        *[Patch(lowerings, op, _pool(lowerings[op], other), reason, "torch>=2.16") for op, other in fallbacks.items()]
    ):
        yield


def _pool(lowered: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, counts_padding: bool, divisor: Any = None
    ) -> Any:
        function = fallback if ceil and counts_padding and divisor is None else lowered
        return function(grad, x, kernel, stride, padding, ceil, counts_padding, divisor)

    return run


@contextlib.contextmanager
def wide_negative_integers() -> Iterator[None]:
    """Pass integers below -2^31 to kernels of users in 64 bits; the compiler checks only the upper bound."""
    from torch._inductor.codegen import triton_utils
    from torch._inductor.utils import expr_fits_within_32bit as fits_above
    from torch._inductor.virtualized import V

    def fits(value: Any) -> bool:
        if not fits_above(value):
            return False
        graph: Any = V.graph
        sizes = graph.sizevars
        if sizes.statically_known_true(value >= _LEAST_OF_32_BITS):
            return True
        if not sizes.shape_env.has_guarding_hint(value) or sizes.guarding_hint_or_throw(value) < _LEAST_OF_32_BITS:
            return False
        sizes.check_leq(_LEAST_OF_32_BITS, value)
        return True

    reason = "Pass integers below -2^31 to kernels in 64 bits"
    with patched(Patch(triton_utils, "expr_fits_within_32bit", fits, reason, "torch>=2.16")):
        yield
