"""Changes of the schema: each is classified, and the next version has every reason."""

import copy

import pytest
from diff import Change, changes, check, main, next_version, report
from lock import lock_of_records, text_of


def entry(kind, name, **rest):
    """Return an entry of a lock."""
    return {"kind": kind, "name": name, **rest, "since": "1.0"}


def lock(*entries, version="1.0", convention=1):
    """Return a lock."""
    return {"format": version, "calling_convention": convention, "entries": list(entries)}


def field(name, *union, **rest):
    """Return the entry of a field of `Node`."""
    return entry("field", f"Node.{name}", type=list(union), **rest)


NODE, REGION = entry("record", "Node"), entry("record", "Region")
OP, LINE, COUNTED = field("op", "string"), field("line", "int"), field("line", "int", default=0)
NEW = "field `Node.line` is new, with a default: older readers refuse documents that set it"
PLAIN, MORE = lock(NODE, OP), lock(NODE, OP, COUNTED)
DTYPE = entry("type", "DType", type=['"float32"', '"int8"'])
WIDER_DTYPE = entry("type", "DType", type=['"float16"', '"float32"', '"int8"'])

CHANGES = [
    ("major", [OP, REGION], [OP], "record `Region` is gone: documents that have it are refused"),
    ("major", [OP, COUNTED], [OP], "field `Node.line` is gone: documents that have it are refused"),
    ("major", [OP], [OP, LINE], "field `Node.line` is new and required: documents written before lack it"),
    ("major", [COUNTED], [LINE], "field `Node.line` is required: documents written before may leave it out"),
    (
        "major",
        [field("line", "int", "bool", default=0)],
        [field("line", "int", "bool", default=False)],
        "the default of field `Node.line` is false, was 0: documents that leave it out change their meaning",
    ),
    (
        "major",
        [field("line", "int", "null")],
        [LINE],
        "field `Node.line` takes `int`, took `int | null`: documents written before may not fit",
    ),
    (
        "major",
        [field("line", {"array": ["int", "null"]})],
        [field("line", {"array": ["int"]})],
        "field `Node.line` takes `array<int>`, took `array<int | null>`: documents written before may not fit",
    ),
    (
        "major",
        [field("line", {"array": ["int"]})],
        [field("line", {"map": ["int"]})],
        "field `Node.line` takes `map<int>`, took `array<int>`: documents written before may not fit",
    ),
    (
        "major",
        [WIDER_DTYPE],
        [DTYPE],
        'type `DType` takes `"float32" | "int8"`, took `"float16" | "float32" | "int8"`: documents written before may '
        "not fit",
    ),
    (
        "major",
        [entry("document", "graph", record="Node")],
        [entry("document", "graph", record="Graph")],
        "document `graph` holds `Graph`, held `Node`",
    ),
    ("minor", [OP], [OP, REGION], "record `Region` is new"),
    ("minor", [OP], [OP, COUNTED], NEW),
    ("minor", [LINE], [COUNTED], "field `Node.line` has a default: older readers refuse documents that leave it out"),
    (
        "minor",
        [LINE],
        [field("line", "int", "Region")],
        "field `Node.line` takes `Region | int`, took `int`: older readers refuse what is new",
    ),
    (
        "minor",
        [DTYPE, field("dtype", '"int8"')],
        [DTYPE, field("dtype", "DType")],
        'field `Node.dtype` takes `DType`, took `"int8"`: older readers refuse what is new',
    ),
    ("note", [OP], [OP, DTYPE], "type `DType` is new"),
]


@pytest.mark.parametrize(("severity", "old", "new", "what"), CHANGES)
def test_change_is_classified_and_decides_the_next_version(severity, old, new, what):
    found = changes(lock(NODE, *old), lock(NODE, *new))
    assert found == [Change(severity, what)]
    assert next_version(PLAIN, found) == {"major": (2, 0), "minor": (1, 1), "note": (1, 0)}[severity]


def test_same_types_written_otherwise_are_no_change():
    named, spelled = (lock(DTYPE, NODE, field("dtype", *union)) for union in (["DType"], ['"float32"', '"int8"']))
    assert changes(named, spelled) == changes(spelled, named) == []


def test_report_has_the_gravest_change_first_every_reason_and_the_version():
    old = lock(NODE, OP, LINE, version="3.4")
    new = lock(NODE, OP, field("column", "int", default=0), REGION, convention=2)
    assert report(old, changes(old, new)) == [
        "  major: field `Node.line` is gone: documents that have it are refused",
        "  minor: field `Node.column` is new, with a default: older readers refuse documents that set it",
        "  minor: record `Region` is new",
        "  note: the calling convention is 2, was 1; its version is apart from the format's",
        "next version: 4.0",
    ]


# --- the check of continuous integration ------------------------------------------------------------------


def test_check_of_a_stale_lock_lists_the_changes():
    assert check(PLAIN, None, MORE) == [
        "schemas/v1/lock.json differs from the records:",
        f"  minor: {NEW}",
        "next version: 1.1",
        "run `python schemas/tools/lock.py --write` and `generate.py`, and say in schemas/CHANGELOG.md what changed",
    ]


def test_check_of_a_change_after_the_release_asks_for_a_higher_version():
    assert check(MORE, PLAIN, MORE) == [
        "format 1.0 is released, and the records changed:",
        f"  minor: {NEW}",
        "next version: 1.1",
        "FORMAT_VERSION is 1.0: raise it, and write `FEATURES` to go with it",
    ]


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_check_of_a_change_with_a_version_that_is_high_enough_finds_nothing(version):
    new = {**MORE, "format": version}
    assert check(new, PLAIN, new) == []


def test_lock_keeps_since_of_what_was_there_and_dates_what_is_new():
    before = copy.deepcopy(lock_of_records())
    for known in before["entries"]:
        known["since"] = "0.7"
    del before["entries"][-1]
    since = [known["since"] for known in lock_of_records(before)["entries"]]
    assert since == ["0.7"] * len(before["entries"]) + ["1.1"]


def test_command_prints_the_changes_between_two_files(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(text_of(PLAIN))
    new.write_text(text_of(MORE))
    assert main([str(old), str(new)]) == 0
    assert capsys.readouterr().out == (f"  minor: {NEW}\nnext version: 1.1\n")
