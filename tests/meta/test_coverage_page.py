"""The page on coverage says what the tables of the sweeps hold."""

from tests.sweeps import coverage


def test_page_is_what_the_tables_say():
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(), "run `python -m tests.sweeps.coverage`"
