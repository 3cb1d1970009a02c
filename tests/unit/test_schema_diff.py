"""Changes of the schema: each is classified, and the next version has every reason."""

import copy
import json

import pytest
from diff import Change, changes, check, main, next_version, report
from lock import lock_of_records, text_of


def entry(kind, name, **rest):
    """Return an entry of a lock."""
    return {"kind": kind, "name": name, **rest, "since": "1.0"}


def lock(*entries, version="1.0", convention=1):
    """Return a lock."""
    return {"format": version, "calling_convention": convention, "entries": list(entries)}


def record(*fields, name="Node", **rest):
    """Return the entries of a record."""
    return [entry("record", name, **rest), *fields]


def field(name, *union, **rest):
    """Return the entry of a field of `Node`."""
    return entry("field", f"Node.{name}", type=list(union), **rest)


OP = field("op", "string")
PLAIN = lock(*record(OP))
DTYPE = entry("type", "DType", type=['"float32"', '"int8"'])
WIDER_DTYPE = entry("type", "DType", type=['"float16"', '"float32"', '"int8"'])

MAJOR = {
    "record_gone": (
        lock(*record(OP), *record(name="Region")),
        PLAIN,
        "record `Region` is gone: documents that have it are refused",
    ),
    "field_gone": (
        lock(*record(OP, field("line", "int", default=0))),
        PLAIN,
        "field `Node.line` is gone: documents that have it are refused",
    ),
    "required_field_new": (
        PLAIN,
        lock(*record(OP, field("line", "int"))),
        "field `Node.line` is new and required: documents written before lack it",
    ),
    "default_changed": (
        lock(*record(field("line", "int", default=0))),
        lock(*record(field("line", "int", default=1))),
        "the default of field `Node.line` is 1, was 0: documents that leave it out change their meaning",
    ),
    "default_gone": (
        lock(*record(field("line", "int", default=0))),
        lock(*record(field("line", "int"))),
        "field `Node.line` is required: documents written before may leave it out",
    ),
    "false_is_not_zero": (
        lock(*record(field("line", "int", "bool", default=0))),
        lock(*record(field("line", "int", "bool", default=False))),
        "the default of field `Node.line` is false, was 0: documents that leave it out change their meaning",
    ),
    "type_changed": (
        lock(*record(field("line", "int"))),
        lock(*record(field("line", "string"))),
        "field `Node.line` takes `string`, took `int`: documents written before may not fit",
    ),
    "type_narrowed": (
        lock(*record(field("line", "int", "null"))),
        lock(*record(field("line", "int"))),
        "field `Node.line` takes `int`, took `int | null`: documents written before may not fit",
    ),
    "items_narrowed": (
        lock(*record(field("lines", {"array": ["int", "null"]}))),
        lock(*record(field("lines", {"array": ["int"]}))),
        "field `Node.lines` takes `array<int>`, took `array<int | null>`: documents written before may not fit",
    ),
    "array_became_map": (
        lock(*record(field("lines", {"array": ["int"]}))),
        lock(*record(field("lines", {"map": ["int"]}))),
        "field `Node.lines` takes `map<int>`, took `array<int>`: documents written before may not fit",
    ),
    "enumeration_narrowed": (
        lock(WIDER_DTYPE),
        lock(DTYPE),
        'type `DType` takes `"float32" | "int8"`, took `"float16" | "float32" | "int8"`: documents written before may '
        "not fit",
    ),
    "tag_changed": (
        lock(*record(OP, tag="node")),
        lock(*record(OP, tag="call")),
        "the tag of record `Node` is 'call', was 'node'",
    ),
    "document_changed": (
        lock(entry("document", "graph", record="Node")),
        lock(entry("document", "graph", record="Graph")),
        "document `graph` holds `Graph`, held `Node`",
    ),
}

MINOR = {
    "record_new": (PLAIN, lock(*record(OP), *record(name="Region")), "record `Region` is new"),
    "field_with_default_new": (
        PLAIN,
        lock(*record(OP, field("line", "int", "null", default=None))),
        "field `Node.line` is new, with a default: older readers refuse documents that set it",
    ),
    "default_new": (
        lock(*record(field("line", "int"))),
        lock(*record(field("line", "int", default=0))),
        "field `Node.line` has a default: older readers refuse documents that leave it out",
    ),
    "arm_new": (
        lock(*record(field("line", "int"))),
        lock(*record(field("line", "int", "Region"))),
        "field `Node.line` takes `Region | int`, took `int`: older readers refuse what is new",
    ),
    "enumeration_wider": (
        lock(DTYPE),
        lock(WIDER_DTYPE),
        'type `DType` takes `"float16" | "float32" | "int8"`, took `"float32" | "int8"`: older readers refuse what is '
        "new",
    ),
    "named_type_in_place_of_its_part": (
        lock(DTYPE, *record(field("dtype", '"int8"'))),
        lock(DTYPE, *record(field("dtype", "DType"))),
        'field `Node.dtype` takes `DType`, took `"int8"`: older readers refuse what is new',
    ),
}

NOTES = {
    "calling_convention": (
        PLAIN,
        lock(*record(OP), convention=2),
        "the calling convention is 2, was 1; its version is apart from the format's",
    ),
    "named_type_new": (PLAIN, lock(*record(OP), DTYPE), "type `DType` is new"),
}


@pytest.mark.parametrize(("old", "new", "what"), MAJOR.values(), ids=MAJOR)
def test_change_that_breaks_older_documents_is_major(old, new, what):
    found = changes(old, new)

    assert found == [Change("major", what)]
    assert next_version(old, found) == (2, 0)


@pytest.mark.parametrize(("old", "new", "what"), MINOR.values(), ids=MINOR)
def test_change_that_only_older_readers_refuse_is_minor(old, new, what):
    found = changes(old, new)

    assert found == [Change("minor", what)]
    assert next_version(old, found) == (1, 1)


@pytest.mark.parametrize(("old", "new", "what"), NOTES.values(), ids=NOTES)
def test_change_that_json_does_not_show_is_a_note(old, new, what):
    found = changes(old, new)

    assert found == [Change("note", what)]
    assert next_version(old, found) == (1, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PLAIN, PLAIN),
        (lock(DTYPE, *record(field("dtype", '"float32"', '"int8"'))), lock(DTYPE, *record(field("dtype", "DType")))),
        (lock(DTYPE, *record(field("dtype", "DType"))), lock(*record(field("dtype", '"float32"', '"int8"')))),
    ],
    ids=["same", "named", "spelled_out"],
)
def test_same_types_written_otherwise_are_no_change(old, new):
    assert changes(old, new) == []


def test_report_has_the_gravest_change_first_every_reason_and_the_version():
    old = lock(*record(OP, field("line", "int")), version="3.4")
    new = lock(*record(OP, field("column", "int", default=0)), *record(name="Region"), convention=2)

    assert report(old, changes(old, new)) == [
        "  major: field `Node.line` is gone: documents that have it are refused",
        "  minor: field `Node.column` is new, with a default: older readers refuse documents that set it",
        "  minor: record `Region` is new",
        "  note: the calling convention is 2, was 1; its version is apart from the format's",
        "next version: 4.0",
    ]


# --- the check of continuous integration ------------------------------------------------------------------

MORE = lock(*record(OP, field("line", "int", default=0)))


def test_check_of_a_current_lock_finds_nothing():
    assert check(PLAIN, None, PLAIN) == []


def test_check_of_a_stale_lock_lists_the_changes():
    assert check(PLAIN, None, MORE) == [
        "schemas/v1/lock.json differs from the records:",
        "  minor: field `Node.line` is new, with a default: older readers refuse documents that set it",
        "next version: 1.1",
        "run `python schemas/tools/lock.py --write` and `generate.py`, and say in schemas/CHANGELOG.md what changed",
    ]


def test_check_of_a_missing_lock_says_how_to_write_it():
    assert check(None, None, PLAIN) == ["there is no schemas/v1/lock.json; run `python schemas/tools/lock.py --write`"]


def test_check_of_a_change_after_the_release_asks_for_a_higher_version():
    assert check(MORE, PLAIN, MORE) == [
        "format 1.0 is released, and the records changed:",
        "  minor: field `Node.line` is new, with a default: older readers refuse documents that set it",
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


def test_lock_through_its_text_is_the_same():
    assert json.loads(text_of(lock_of_records())) == lock_of_records()


def test_command_prints_the_changes_between_two_files(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(text_of(PLAIN))
    new.write_text(text_of(MORE))

    assert main([str(old), str(new)]) == 0
    assert capsys.readouterr().out == (
        "  minor: field `Node.line` is new, with a default: older readers refuse documents that set it\n"
        "next version: 1.1\n"
    )
