"""Every shard of every sweep: its rows are those of the committed table, and none is wrong or a crash."""

import pytest

from tests.sweeps import table
from tests.sweeps.shard import PEERS, SWEEPS, missing, rows_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("sweep", "index"), [(s, i) for s, (_, shards) in SWEEPS.items() for i in range(shards)])
def test_shard_run_again_gives_the_rows_of_the_table(sweep, index):
    if needed := missing(sweep):
        pytest.skip(needed)
    recorded = table.read(table.RESULTS / f"{sweep}.tsv")
    rows = rows_of(sweep, index)
    changed = {item: (recorded.get(item), row) for item, row in rows.items() if recorded.get(item) != row}
    assert changed == {}


@pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep not in PEERS])
def test_table_holds_neither_wrong_results_nor_crashes(sweep):
    rows = table.read(table.RESULTS / f"{sweep}.tsv")
    assert rows
    assert {item: rows[item] for item in table.bad(rows)} == {}
