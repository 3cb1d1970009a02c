"""`python -m tests.fuzz.table`: write `docs/operators.tsv`, what keeps each operator of torch in bounds.

`torch`: its own checks, as far as the fuzzer's calls showed. `precondition`: what `engines/preconditions` checks before
each call. `zeroed`: its memory is filled before anyone reads it. `refused`: not on the list. The numbers are those of
`results/operators.tsv`: how many calls with hostile arguments there were, and how many of them the operator took.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.engines import ops
from aotexport_runtime.engines.preconditions import memory
from tests.fuzz.operators import read

TABLE = Path(__file__).parents[2] / "docs" / "operators.tsv"


def bounds(operator: str) -> str:
    """Return what keeps an operator of the list, `base.overload`, in bounds."""
    if operator in memory.FRESH or operator in memory.GROWING:
        return "zeroed"
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
