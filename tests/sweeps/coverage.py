"""`python -m tests.sweeps.coverage`: write `docs/coverage.md`, the page that sums up the tables of `results/`."""

from collections import Counter
from pathlib import Path

from tests.sweeps import table
from tests.sweeps.shard import LIBRARIES
from tests.sweeps.torch_export import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

SWEEPS = {
    "op_db": "operators of torch, with the samples of torch's own tests",
    "module_db": "layers of `torch.nn`, with the samples of torch's own tests",
    "bodies": "`cond`, `while_loop`, `scan`, `map` with bodies of all kinds",
    "programs": "what `torch.export` documents to support, and not to",
    "zoo": "models of transformers, made small, in training and inference, with a fixed and a dynamic batch",
    "detection": "models of transformers that find objects and segments, with dynamic height and width, in inference",
    "libraries": f"models of {', '.join(LIBRARIES).replace('==', ' ')}, likewise",
}

BEGIN = """# Coverage

What is captured, by the sweeps in `tests/sweeps`: each sample is exported, and a fresh process compares the bundle with
eager, outputs, gradients, strides and all. `python -m tests.sweeps` runs them, and `python -m tests.sweeps.coverage`
writes this page. The tables in `tests/sweeps/results` have every item: `grep llama tests/sweeps/results/zoo.tsv`.

*Served* is equal to eager in training and inference, most by the functional graphs, some by the forward graph alone.
*Refused* is told at export, by an error that names the operator.

"""

PEER = """
## Beside torch.export

The same models of libraries by `torch.export` (`strict=False`) with the same dynamic axes: each with a fixed and with
dynamic sizes, in training and inference. *Equal* is taken in both modes and equal to eager in outputs and gradients;
*other* is taken, and then fails or gives other numbers, by more than 1e-4 of the largest of a tensor.
`python -m tests.sweeps zoo libraries torch_export` runs all.

| library | samples | served | refused | torch.export: equal | refused | other |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    tables = {sweep: table.read(table.RESULTS / f"{sweep}.tsv") for sweep in SWEEPS}
    lines = [
        "| sweep | items | samples | served | by the forward graph alone | refused | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_totals(text, tables[sweep]) for sweep, text in SWEEPS.items()]
    return BEGIN + "\n".join(lines) + "\n" + _reasons(tables) + PEER + _beside(tables)


def _totals(text: str, rows: dict[str, str]) -> str:
    """Return the line of a sweep."""
    totals = sum((table.counts(row) for row in rows.values()), Counter())
    run = sum(bool(table.counts(row).total()) for row in rows.values())
    alone = totals[table.FORWARD] + totals[table.DROPPED]
    refused, wrong = totals[table.REFUSED] + totals[table.REFUSED_LATE], totals[table.WRONG] + totals[table.CRASHED]
    share = (totals[table.EQUAL] + alone) / totals.total()
    return f"| {text} | {run} | {totals.total()} | {share:.1%} | {alone} | {refused} | {wrong} |"


def _beside(tables: dict[str, dict[str, str]]) -> str:
    """Return the lines of libraries, with what the peer does."""
    rows = tables["libraries"] | {ZOO + item: row for item, row in tables["zoo"].items()}
    peer = table.read(table.RESULTS / "torch_export.tsv")
    lines: list[str] = []
    for library in sorted({item.split("/")[0] for item in rows}):
        ours, theirs = (
            sum((table.counts(row) for item, row in found.items() if item.startswith(f"{library}/")), Counter())
            for found in (rows, peer)
        )
        served = ours[table.EQUAL] + ours[table.FORWARD] + ours[table.DROPPED]
        counts = (
            ours.total(),
            served,
            ours.total() - served,
            theirs[table.EQUAL],
            theirs[table.REFUSED],
            theirs[table.WRONG] + theirs[table.CRASHED],
        )
        lines.append(f"| {library} | {' | '.join(map(str, counts))} |\n")
    return "".join(lines)


def _reasons(tables: dict[str, dict[str, str]]) -> str:
    """Return the lists of items that are refused, and of those that run the forward graph alone, by reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for rows in tables.values():
        for item, row in rows.items():
            for reason in row.split("\t")[len(table.KINDS)].split(" | "):
                kind, _, why = reason.partition(": ")
                if kind in table.KINDS:
                    found.setdefault(kind, {}).setdefault(_short(why), []).append(item.split(" ")[0])
    parts: list[str] = []
    for kind, title in (
        (table.REFUSED, "Refused"),
        (table.FORWARD, "By the forward graph alone"),
        (table.DROPPED, "Joint graphs that verification drops"),
    ):
        reasons = found.get(kind, {})
        lines = [f"- {why}: {_named(list(dict.fromkeys(items)))}" for why, items in sorted(reasons.items())]
        parts.append(f"\n## {title}\n\n" + "\n".join(lines) + "\n" if lines else "")
    return "".join(parts)


def _named(items: list[str]) -> str:
    """Return the first three items, and how many there are beside them."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(f"`{item}`" for item in items[:3]) + more


def _short(why: str) -> str:
    """Return the first sentence of a reason."""
    return why.partition(". ")[0].partition(" What was tried")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
