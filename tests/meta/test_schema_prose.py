"""The prose of the format says what the code does, where that can be compared."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from aotexport.torch_internals.names import ViewAndMutationMeta
from aotexport_runtime.allowed import operators
from aotexport_runtime.allowed.signatures import RENAMED
from aotexport_runtime.bundle.directory import MAX_HOLE_NBYTES
from aotexport_runtime.bundle.signature import MOST_NBYTES
from aotexport_runtime.execution.ops import ADAPTERS
from aotexport_runtime.schema.bounded import MAX_AXES, MAX_NODES, MAX_QUANTILES, MAX_TERMS
from aotexport_runtime.schema.limits import DEFAULT
from aotexport_runtime.schema.sizes import SizeOperator
from aotexport_runtime.schema.versions import CALLING_CONVENTION, FORMAT_VERSION, format_version
from aotexport_runtime.validate.types import kinds
from aotexport_runtime.validate.vector import MAX_GENERATED
from aotexport_runtime.values.compare import SAMPLE, TOLERANCES
from tests.reader.rules import RULES

SCHEMAS = Path(__file__).parents[2] / "schemas"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.md")}
CORE = PAGES["README.md"]
PROSE = CORE + PAGES["beyond.md"]
VERSIONS = {"1.0", "1.1", "2.13", "2.14", "2.15", "8.0", "9.0", "12.0"}
"""What the text says of versions, of the format, torch, devices and drivers."""


def table(head: str, text: str = PROSE) -> list[list[str]]:
    """Return the rows of the table with the header line `head`, as cells."""
    _, _, rest = text.partition(f"| {head} |\n")
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def names(cells: list[str], prefix: str = "") -> set[str]:
    """Return the names in back quotes of the first cells, all with the prefix that the first of each cell has."""
    return {prefix + name.removeprefix(prefix) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


FIELDS = {row[0].strip("`"): row[1] for row in table("field | what becomes of it", PAGES["rationale.md"])}


def test_metadata_table_has_every_field_of_the_installed_torch():
    installed = [field.name for field in dataclasses.fields(ViewAndMutationMeta)]
    assert [name for name in FIELDS if name in installed] == installed
    assert {*FIELDS} - {*installed} <= {"act_input_indices", "act_input_paths", "saved_tensor_is_graph_input"}


def operands(*namespaces: str) -> set[str]:
    return {name for name in operators.OPERANDS if name.startswith(namespaces)}


@pytest.mark.parametrize(
    ("head", "prefix", "expected"),
    [
        ("builtin | arguments | result", "python::", operands("python::")),
        ("effect | arguments | what it does; result", "", operands("torch::")),
        ("`dtypes` | dtype of the results", "", set(kinds().values())),
        ("operator | arguments | result", "", operands("higher_order::")),
        ("op | operands | value", "", set(get_args(SizeOperator))),
        ("subclass operator | arguments | result", "", operands("subclass::", "distributed::")),
    ],
)
def test_table_has_every_name_of_the_code(head, prefix, expected):
    assert set().union(*(names([row[0]], prefix) for row in table(head))) == expected


def test_prose_lists_the_operators_of_view_steps():
    _, _, rest = PROSE.partition("these operators of `aten`:")
    assert names([rest.split(".")[0]]) == operators.VIEWS


def test_prose_names_the_adapters_and_the_renamed_arguments():
    assert names([row[0] for row in table("adapter for | where | runs")]) == {f"aten::{name}" for name in ADAPTERS}
    _, _, renamed = " ".join(PROSE.split()).partition("the positional `grad` of ")
    assert names([renamed.partition(" is ")[0]]) == set(RENAMED)


def test_prose_and_history_are_of_the_current_versions():
    version = format_version(FORMAT_VERSION)
    assert f"**format {version}** and **calling convention {CALLING_CONVENTION}**" in PROSE
    assert table("format | calling convention | what is new")[-1][:2] == [version, str(CALLING_CONVENTION)]
    assert f"## {version} " in (SCHEMAS / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sentence",
    [
        f"nested {DEFAULT.json_depth} levels deep; a file may be {DEFAULT.json_nbytes >> 30} GiB long",
        f"and hold {DEFAULT.json_containers:,} of them and {DEFAULT.json_values:,} values",
        f"as many strides as sizes, at most {MAX_AXES}.",
        f"at most {DEFAULT.nodes:,} nodes".replace(",", " "),
        f"at most {MAX_NODES:,} calls of submodules".replace(",", " "),
        f"at most {MAX_TERMS} terms",
        f"by 2 to {MAX_QUANTILES} quantiles",
        f"at most {MAX_GENERATED} elements",
        f"no more than {MAX_HOLE_NBYTES >> 20} MiB of holes",
        f"A signature has at most {MOST_NBYTES >> 20} MiB",
        f"of more than {SAMPLE} elements",
        *(f"{bound:.0e} for {dtype}".replace("e-0", "e-") for dtype, bound in TOLERANCES.items()),
    ],
)
def test_prose_has_the_bounds_of_the_code(sentence):
    assert sentence in " ".join((PROSE + PAGES["codes.md"]).split())


def numbered(text: str) -> list[tuple[int, int]]:
    """Return the numbers of the rules of a page."""
    return [(int(section), int(at)) for section, at in re.findall(r"^\*\*(\d+)\.(\d+)\*\*", text, re.MULTILINE)]


NOT_TAKEN = {
    **dict.fromkeys(("7.1", "7.2", "8.1", "8.6", "8.7", "8.11", "10.1", "10.2"), "says what is what"),
    **dict.fromkeys(("7.5", "7.12", "7.20"), "of what this reader does not read"),
    **dict.fromkeys(("7.6", "7.18"), "of readers that place a bundle elsewhere, and of writers"),
    **dict.fromkeys(
        ("7.8", "7.10", *(f"7.{at}" for at in range(22, 31)), "7.33", "10.15"), "refused at load: golden/refused"
    ),
    "10.4": "nothing is recorded, by 10.3",
}
"""Rules of sections 7, 8 and 10 that the second reader has no line for, each with the reason."""


def test_rules_are_numbered_in_order_and_what_refers_to_one_names_one():
    of_pages = [numbered(CORE), numbered(PAGES["beyond.md"])]
    rules = sorted([*of_pages[0], *of_pages[1]])
    sections = sorted({section for section, _ in rules})
    counted = [(section, at) for section in sections for at in range(1, 1 + sum(s == section for s, _ in rules))]
    texts = [re.sub(r"`[^`]*`", "", PAGES[name]) for name in ("README.md", "beyond.md", "codes.md", "rationale.md")]
    named = {found for text in texts for found in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", text)}
    assert all(found == sorted(found) for found in of_pages)
    assert rules == counted
    assert named - VERSIONS - {f"{section}.{at}" for section, at in rules} == set()


def test_every_rule_of_sections_7_8_and_10_can_be_taken_from_the_second_reader_or_has_a_reason():
    known = {f"{section}.{at}" for section, at in numbered(PROSE)}
    assert {rule.number for rule in RULES} - known == set()
    said = {number for number in known if number.partition(".")[0] in ("7", "8", "10")}
    assert said - {rule.number for rule in RULES} == set(NOT_TAKEN)
