"""`python -m tests.sweeps [SWEEP ...]`: run sweeps, rewrite their tables in `results/`, and print the totals."""

import argparse
import time
from collections import Counter

from tests.sweeps import table
from tests.sweeps.shard import SWEEPS, missing, rows_of


def main() -> None:
    """Run the sweeps that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps", description=__doc__)
    parser.add_argument("sweep", nargs="*", choices=[[], *SWEEPS], help="default: all")
    for sweep in parser.parse_args().sweep or SWEEPS:
        if needed := missing(sweep):
            print(needed, flush=True)
            continue
        rows: dict[str, str] = {}
        shards = SWEEPS[sweep][1]
        for index in range(shards):
            start = time.monotonic()
            found = rows_of(sweep, index)
            print(f"{sweep} {index + 1}/{shards}: {time.monotonic() - start:.0f} s", flush=True)
            for item in table.bad(found):
                print(f"  {item}: {found[item]}", flush=True)
            rows |= found
        table.write(table.RESULTS / f"{sweep}.tsv", rows)
        print(_totals(sweep, rows), flush=True)


def _totals(sweep: str, rows: dict[str, str]) -> str:
    totals = sum((table.counts(row) for row in rows.values()), Counter())
    total = totals.total()
    parts = [f"{totals[kind]} {kind} ({totals[kind] / max(total, 1):.1%})" for kind in table.KINDS]
    without = sum(not table.counts(row).total() for row in rows.values())
    return f"{sweep}: {total} samples of {len(rows)} items, {without} of them excluded: {', '.join(parts)}"


if __name__ == "__main__":
    main()
