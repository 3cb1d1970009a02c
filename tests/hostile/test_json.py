"""JSON: large, deep, and no text; what else is none is in `tests/golden/refused`."""

import json

import pytest

from tests.hostile.crafted import FILES, Crafted

DEEP = 5000


def _nested(levels: int) -> str:
    return '{"kind": "size", "value": ' + '{"op": "not", "args": [' * levels + "1" + "]}" * levels + "}"


def _outputs(text: str, **others: str) -> bytes:
    """Return a graph whose only output is `text`; keywords are further fields, first."""
    fields = {**others, "inputs": "[]", "nodes": "[]", "outputs": f"[{text}]"}
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


MALFORMED = {
    "pickle": (b"\x80\x04\x95", "JSON is malformed: invalid character (byte 0)"),
    "deep_sizes": (_outputs(_nested(DEEP)), "nested deeper than 64 levels"),
    "deep_behind_brackets_in_a_string": (
        _outputs(_nested(DEEP), modules=json.dumps(["]" * 2 * DEEP])),
        "nested deeper than 64 levels",
    ),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED.values(), ids=MALFORMED)
def test_graph_of_malformed_json_is_refused(crafted: Crafted, data, message):
    crafted.write(FILES["forward"], data)
    assert crafted.refusal() == f"programs/train/forward.json: {message}"


def test_bytes_that_are_not_utf8_are_refused(crafted: Crafted):
    crafted.write(FILES["forward"], b'{"inputs": [], "nodes": [], "outputs": ["\xff"]}')
    # As Python says it, or msgspec since 0.23.
    expected = (
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "Invalid UTF-8 encoded string",
    )
    assert crafted.refusal().removeprefix("programs/train/forward.json: ") in expected


def test_error_about_a_long_value_is_short(crafted: Crafted):
    crafted.write(FILES["forward"], _outputs(json.dumps({"kind": "x" * 100_000})))
    assert crafted.refusal() == "programs/train/forward.json: Invalid value '" + "x" * 285
