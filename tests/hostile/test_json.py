"""JSON: truncated, foreign, deep, with numbers and strings beyond what records hold."""

import json

import pytest

from aotexport_runtime import BundleInvalid, open_bundle
from tests.hostile.crafted import FILES, Crafted

DEEP = 5000


def _nested(levels: int) -> str:
    return '{"kind": "size", "value": ' + '{"op": "not", "args": [' * levels + "1" + "]}" * levels + "}"


def _outputs(text: str, **others: str) -> bytes:
    """Return a graph whose only output is `text`; keywords are further fields, first."""
    fields = {**others, "inputs": "[]", "nodes": "[]", "outputs": f"[{text}]"}
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


MALFORMED = {
    "empty": (b"", "Input data was truncated"),
    "truncated": (b'{"inputs": [', "Input data was truncated"),
    "garbage": (b"\x00\x01\x02", "JSON is malformed: invalid character (byte 0)"),
    "pickle": (b"\x80\x04\x95", "JSON is malformed: invalid character (byte 0)"),
    "two_documents": (_outputs("1") + b"{}", "JSON is malformed: trailing characters (byte 44)"),
    "lone_surrogate": (_outputs(r'"\ud800"'), "Input data was truncated"),
    "array": (b"[]", "Expected `object`, got `array`"),
    "unknown_field": (_outputs("1", code='"import os"'), "Object contains unknown field `code`"),
    "missing_field": (b'{"inputs": [], "nodes": []}', "Object missing required field `outputs`"),
    "unknown_kind": (_outputs('{"kind": "pickle"}'), "Invalid value 'pickle' - at `$.outputs[0].kind`"),
    "not_a_number": (_outputs("NaN"), "JSON is malformed: invalid character (byte 40)"),
    "float_out_of_range": (_outputs("1e999"), "Number out of range - at `$.outputs[0]`"),
    "integer_of_5000_digits": (_outputs("9" * 5000), "Integer value out of range - at `$.outputs[0]`"),
    "integer_of_65_bits": (_outputs(str(1 << 64)), "an integer argument has more than 64 bits"),
    "size_of_65_bits": (
        _outputs(f'{{"kind": "size", "value": {1 << 63}}}'),
        "an integer of a size has more than 64 bits",
    ),
    "key_twice": (_outputs("1")[:-1] + b', "nodes": []}', "an object has the same key twice"),
    "key_twice_with_an_escape": (_outputs("1")[:-1] + rb', "n\u006fdes": []}', "an object has the same key twice"),
    "key_twice_beside_an_escaped_colon": (
        _outputs(r'"\u003a", "\u0022\u003a"')[:-1] + b', "nodes": []}',
        "an object has the same key twice",
    ),
    "integer_with_a_fraction": (
        _outputs('{"kind": "size", "value": 1.0}'),
        "Expected `int | str | object`, got `float` - at `$.outputs[0].value`",
    ),
    "many_arrays": (
        _outputs(",".join(["[[[]]]"] * (1 << 22))),
        "more than the 8388608 lists and objects that are read of a file",
    ),
    "deep_arrays": (_outputs("[" * DEEP + "]" * DEEP), "nested deeper than 64 levels"),
    "deep_sizes": (_outputs(_nested(DEEP)), "nested deeper than 64 levels"),
    "deep_behind_brackets_in_a_string": (
        _outputs(_nested(DEEP), modules=json.dumps(["]" * 2 * DEEP])),
        "nested deeper than 64 levels",
    ),
    "deep_behind_an_escaped_quote": (
        _outputs(_nested(DEEP), modules=r'["\\\"' + "]" * 2 * DEEP + '"]'),
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not the manifest of a bundle: Input data was truncated"),
        (b"[" * 100, "nested deeper than 64 levels"),
        (b'{"format": 1}', "not the manifest of a bundle: Expected `str`, got `int` - at `$.format`"),
        (b"{}", "not the manifest of a bundle: Object missing required field `format`"),
    ],
    ids=["empty", "deep", "wrong_type", "foreign"],
)
def test_manifest_of_malformed_json_is_refused(crafted: Crafted, data, message):
    crafted.write("bundle.json", data)
    with pytest.raises(BundleInvalid) as caught:
        open_bundle(crafted.root)
    assert str(caught.value) == f"bundle.json: {message}"


def test_error_about_a_long_value_is_short(crafted: Crafted):
    crafted.write(FILES["forward"], _outputs(json.dumps({"kind": "x" * 100_000})))
    assert crafted.refusal() == "programs/train/forward.json: Invalid value '" + "x" * 285
