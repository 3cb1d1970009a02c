"""Tables of results: a row per item, with how many of its samples came out how, and why not equal."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EQUAL = "equal"
FORWARD = "forward graph alone"
REFUSED = "refused"
REFUSED_LATE = "refused at run time"
DROPPED = "joint graph dropped"
WRONG = "WRONG"
CRASHED = "CRASHED"
KINDS = (EQUAL, FORWARD, DROPPED, REFUSED, REFUSED_LATE, WRONG, CRASHED)
"""How a sample comes out: equal to eager by both graphs; by the forward graph, with no joint graph; by the forward
graph, since verification drops a joint graph that differs; refused at export with an error of ours; refused by the
loaded bundle with an error of ours; different from eager, so that the export fails; anything else."""

HEADER = "\t".join(("item", *KINDS, "why"))
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Outcome:
    """How one sample came out.

    Attributes:
        kind: one of `KINDS`.
        why: a reason that is the same in every run; empty for what is equal.
    """

    kind: str
    why: str = ""


def row(outcomes: Iterable[Outcome]) -> str:
    """Return an item's row without its name."""
    found = list(outcomes)
    counts = Counter(outcome.kind for outcome in found)
    reasons = sorted({f"{outcome.kind}: {outcome.why}" for outcome in found if outcome.why})
    return "\t".join((*(str(counts[kind]) for kind in KINDS), " | ".join(reasons)))


def excluded(reason: str) -> str:
    """Return the row, without its name, of an item that is not run."""
    return "\t".join((*("0" for _ in KINDS), f"excluded: {reason}"))


def counts(row: str) -> Counter[str]:
    """Return how many samples of a row came out how."""
    return Counter(dict(zip(KINDS, map(int, row.split("\t")[: len(KINDS)]), strict=True)))


def bad(rows: dict[str, str]) -> list[str]:
    """Return the items with a sample that came out wrong or crashed."""
    return [item for item, row in rows.items() if counts(row)[WRONG] or counts(row)[CRASHED]]


def write(path: Path, rows: dict[str, str]) -> None:
    """Write a table, sorted by item."""
    lines = [HEADER, *(f"{item}\t{rows[item]}" for item in sorted(rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, str]:
    """Return the rows of a table, by item.

    Raises:
        ValueError: the file is no such table.
    """
    header, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    if header != HEADER:
        raise ValueError(f"{path} begins with {header!r}, expected {HEADER!r}")
    return dict(line.split("\t", 1) for line in lines)
