"""`python -m tests.fuzz.table`: write `docs/operators.tsv`, what keeps each operator of torch in bounds.

`torch`: its own checks, as far as the fuzzer's calls showed. `precondition`: what `execution/preconditions` checks
before each call. `zeroed`: its memory is filled before anyone reads it. `device`: torch has no kernel of it for
processors and refuses the call there; those of other devices were not called. `refused`: not on the list. The numbers
are those of `results/operators.tsv`: how many calls with hostile arguments there were, and how many of them the
operator took.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.preconditions.table import FRESH, GROWING
from tests.fuzz.operators import read

TABLE = Path(__file__).parents[2] / "docs" / "operators.tsv"


_OF_DEVICES = frozenset(
    (
        *("_fused_rms_norm_backward", "linear_backward", "matmul_backward", "max_pool2d_backward", "native_norm"),
        *(f"cudnn_{base}{kind}" for base in ("batch_norm", "grid_sampler") for kind in ("", "_backward")),
        *(
            f"_scaled_dot_product_{kind}_attention{rest}"
            for kind in ("cudnn", "efficient", "flash")
            for rest in ("", "_backward")
        ),
        *(f"_scaled_dot_product_fused_attention_overrideable{rest}" for rest in ("", "_backward")),
        *("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"),
        *(f"{base}.{overload}" for base in ("addmm", "baddbmm", "bmm", "mm") for overload in ("dtype", "dtype_out")),
    )
)
"""Operators, by base name or by full name, that torch has no kernel of for processors."""


def is_of_devices(operator: str) -> bool:
    """Return whether torch has no kernel of an operator, `base.overload`, for processors."""
    return operator in _OF_DEVICES or operator.partition(".")[0] in _OF_DEVICES


def bounds(operator: str) -> str:
    """Return what keeps an operator of the list, `base.overload`, in bounds."""
    if operator in FRESH or operator in GROWING:
        return "zeroed"
    if is_of_devices(operator):
        return "device"
    name = f"aten::{operator}"
    is_checked = ops.resolve(name, None, frozenset()) is not ops.overload(name, None, frozenset())
    return "precondition" if is_checked else "torch"


def operators_of_torch() -> set[str]:
    """Return the overloads of aten that the installed torch has, as `base.overload`."""
    names = torch._C._dispatch_get_all_op_names()  # noqa: TID251 (there is no public list)
    found = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return {name if "." in name else f"{name}.default" for name in found}


def rows() -> Iterator[tuple[str, str, int, int]]:
    """Yield operator, what keeps it in bounds, calls of the fuzzer, and how many of them the operator took."""
    allowed, fuzzed = allowed_aten_operators(), read()
    for operator in sorted(allowed | operators_of_torch()):
        row = fuzzed.get(operator)
        kept = bounds(operator) if operator in allowed else "refused"
        yield operator, kept, row.calls if row else 0, row.accepted if row else 0


def text() -> str:
    """Return the table."""
    lines = ["operator\tbounds\tcalls\ttaken", *("\t".join(map(str, row)) for row in rows())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        TABLE.write_text(text())
    elif TABLE.read_text() != text():
        sys.exit("docs/operators.tsv is stale: run `python -m tests.fuzz.table`")
