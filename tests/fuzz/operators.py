"""`python -m tests.fuzz.operators [REGEX]`: call every operator of the list with hostile arguments.

Memory is guarded as `tests.fuzz.guarded` says. The table in `results/operators.tsv` has a row per operator; operators
in it with as many calls are not run again.
"""

import argparse
import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.execution import ops
from tests.fuzz.arguments import Arguments, copied
from tests.fuzz.guarded import Note, rows_of, run_guarded, seen_twice
from tests.fuzz.valid_calls import valid_calls_of

RESULTS = Path(__file__).parent / "results" / "operators.tsv"
CALLS = 2000
FROM_TYPES_ALONE = 300
"""How many calls of an operator are drawn from the types in its schema; those after begin at a valid call."""


@dataclass(frozen=True)
class Row:
    """The result of an operator.

    Attributes:
        operator: `base.overload`.
        calls: how many sets of arguments; the seed of each is the operator and its number. If one went wrong, those
            before it, so that the next run begins there.
        accepted: how many of them the operator took.
        outcome: `ok`, or the number of the call that went wrong and how.
    """

    operator: str
    calls: int
    accepted: int
    outcome: str


fuzz = partial(rows_of, "tests.fuzz.operators", Row)


def _call_often(operator: str, calls: range, note: Note) -> None:
    function = ops.resolve(f"aten::{operator}", None, frozenset())
    valid = valid_calls_of(operator)
    accepted = 0
    for call in calls:
        note(call, accepted, "ended before its last call")
        arguments = Arguments(f"{operator} {call}", valid if call >= FROM_TYPES_ALONE else ())
        first, second = seen_twice(partial(arguments.of, function._schema), partial(_called, function))
        if first != second:
            note(call, accepted, f"call {call}: uninitialised bytes")
            return
        accepted += first is not None
    note(calls.stop, accepted, "ok")


def _called(function: Any, args: list[Any], kwargs: dict[str, Any]) -> bytes | None:
    """Return the bytes of the results of a call, and of the arguments that it writes; None: it was refused."""
    args, kwargs = [*map(copied, args)], {name: copied(value) for name, value in kwargs.items()}
    torch.default_generator.manual_seed(0)
    try:
        results = function(*args, **kwargs)
        written = [
            value
            for argument, value in zip(function._schema.arguments, (*args, *kwargs.values()), strict=True)
            if argument.is_write
        ]
        return b"".join(map(bytes_of, tensors_of([results, written])))
    except Exception:  # Whatever a kernel says to hostile arguments.
        return None


def tensors_of(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, list | tuple):
        for result in results:
            yield from tensors_of(result)


def bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.numel() > 1 << 20 or tensor.layout is not torch.strided:
        return b""
    # A copy: zeros that torch tells by a key alone have no memory.
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    # A single element is contiguous with any stride, but is seen as bytes with a stride of 1 alone.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def read(path: Path = RESULTS) -> dict[str, Row]:
    """Return the rows of a table, by operator."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return {
            row["operator"]: Row(row["operator"], int(row["calls"]), int(row["accepted"]), row["outcome"])
            for row in rows
        }


def write(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Write a table of rows, sorted."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["operator", "calls", "accepted", "outcome"])
        table.writerows(asdict(row).values() for row in sorted(rows, key=lambda row: row.operator))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.operators", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="REGEX", help="operators to call; default: all")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--guarded", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.guarded is not None:
        run_guarded(*options.guarded, options.operators, "accepted", _call_often)
        return
    rows = read()
    wanted = [
        name
        for name in sorted(allowed_aten_operators())
        if any(re.search(pattern, name) for pattern in options.operators or [""])
        and (name not in rows or rows[name].calls < options.calls)
    ]
    done = 0
    # Those with as many calls run together, and go on where they stopped.
    for first, names in itertools.groupby(sorted(wanted, key=_calls_of(rows)), _calls_of(rows)):
        for row in fuzz(names, options.calls, first):
            before = rows.get(row.operator, Row(row.operator, 0, 0, "ok"))
            rows[row.operator] = dataclasses.replace(row, accepted=before.accepted + row.accepted)
            done += 1
            if row.outcome != "ok":
                print(f"{row.operator}: {row.outcome}", flush=True)
            if done % 20 == 0 or done == len(wanted):
                write(rows.values())
                print(f"{done} of {len(wanted)}", flush=True)


def _calls_of(rows: dict[str, Row]) -> Callable[[str], int]:
    return lambda name: rows[name].calls if name in rows else 0


if __name__ == "__main__":
    main()
