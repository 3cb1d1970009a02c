"""The page of versions: sections whose results are not given stay."""

import sys

from tests.golden import matrix


def test_page_without_results_stays_as_it_is(tmp_path, monkeypatch):
    runs = [matrix.Run("2.13.0", "3.11.7", "2.4.6", {target: {} for target in matrix.TARGETS})]
    tests = {("2.13.0", "3.11.7", "2.4.6"): matrix.Tests(modules={"tests.test_a"}, passed=2, failed=["tests.test_a.b"])}
    page = "\n".join((matrix.HEAD, matrix.goldens_section(runs), matrix.tests_section(tests, "")))
    path = tmp_path / "versions.md"
    path.write_text(page, "utf-8")
    monkeypatch.setattr(matrix, "PAGE", path)
    monkeypatch.setattr(sys, "argv", ["matrix"])
    matrix.main()
    assert path.read_text("utf-8") == page


def test_goldens_keep_the_rows_and_reasons_of_other_versions():
    def run(torch, python, *failed):
        return matrix.Run(
            torch, python, "2.4.6", {target: dict.fromkeys(failed, "a reason") for target in matrix.TARGETS}
        )

    first = [run("2.9.1", "3.11.7", "one"), run("2.13.0", "3.11.7", "one", "two")]
    again = [run("2.13.0", "3.11.7", "three"), run("2.13.0", "3.14.1")]
    page = matrix.goldens_section(again, matrix.goldens_section(first))
    count = len(matrix.GOLDENS)
    assert [line for line in page.splitlines() if line.startswith("| 2")] == [
        f"| 2.9.1 | 3.11.7 | 2.4.6 | {count - 1} | {count - 1} |",
        f"| 2.13.0 | 3.11.7 | 2.4.6 | {count - 1} | {count - 1} |",
        f"| 2.13.0 | 3.14.1 | 2.4.6 | {count} | {count} |",
    ]
    assert [line for line in page.splitlines() if line.startswith("- ")] == [
        f"- `{golden}` by `{target}`: a reason (torch {release})"
        for target, golden, release in (
            ("autograd", "one", "2.9.1"),
            ("portable", "one", "2.9.1"),
            ("autograd", "three", "2.13.0"),
            ("portable", "three", "2.13.0"),
        )
    ]


def test_rows_of_other_versions_without_failures_stay():
    of = {python: ("2.13.0", python, "2.4.6") for python in ("3.11.7", "3.12.1", "3.13.0")}
    first = {of["3.11.7"]: matrix.Tests({"a"}, passed=2), of["3.12.1"]: matrix.Tests({"a"}, passed=1, failed=["a.b"])}
    before = matrix.tests_section({**first, of["3.13.0"]: matrix.Tests({"a"}, passed=1)}, "")
    after = matrix.tests_section({of["3.13.0"]: matrix.Tests({"a", "c"}, passed=3)}, before)
    assert [line for line in after.splitlines() if line.startswith("| 2")] == [
        "| 2.13.0 | 3.11.7 | 2.4.6 | 1 | 2 | 0 | 0 |",
        "| 2.13.0 | 3.13.0 | 2.4.6 | 2 | 3 | 0 | 0 |",
    ]
