"""Bundles of every format version: still read, still right, still written byte by byte the same."""

import functools
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import aotexport_runtime
from aotexport.verify.onnx.check import check_model
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.results import describe_failures
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.errors import BundleTooNew
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.codec import decode_record, encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import KernelLibrary, LoweredProgram, Target
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.schema.versions import FORMAT_VERSION, format_version, parse_version
from tests.golden.arms import all_arms, arms_of
from tests.golden.cases import CASES, TYPES
from tests.golden.observe import CALLS
from tests.golden.regenerate import regenerate, text_of
from tests.golden.uncovered import UNCOVERED
from tests.reader.bundle import without_tables
from tests.refusals import refusal

HERE = Path(__file__).parent
GOLDENS = sorted(path.parent for path in HERE.glob("v*/*/bundle"))
MAX_NBYTES = 90_000
SCHEMAS = {
    Manifest: "bundle",
    Program: "program",
    Graph: "graph",
    Vector: "vector",
    Target: "target",
    LoweredProgram: "lowered",
    KernelLibrary: "kernels",
}
COMPACT = (Graph, KernelLibrary)

each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.name}")


def documents(golden: Path) -> list[tuple[Path, type]]:
    """Return every JSON file of a golden with the type of its record."""
    bundle = aotexport_runtime.open_bundle(golden / "bundle")
    found: list[tuple[Path, type]] = [(bundle.root / "bundle.json", Manifest)]
    found += [(bundle.root / entry.record, Vector) for entry in bundle.manifest.testvectors]
    for name in bundle.program_names:
        program, folder = bundle.program(name), bundle.root / "programs" / name
        found += [(folder / "program.json", Program), (folder / program.forward.file, Graph)]
        found += [(folder / program.functional.file, Graph)] if program.functional else []
        found += lowered_documents(bundle, name)
    found += [(bundle.root / f"targets/{name}/target.json", Target) for name in bundle.target_names]
    return found


def lowered_documents(bundle: Bundle, program: str) -> list[tuple[Path, type]]:
    found: list[tuple[Path, type]] = []
    targets = next(entry.targets for entry in bundle.manifest.programs if entry.name == program)
    for target in (target for target in targets if target not in ("portable", "onnx")):
        folder, record = bundle.root / f"targets/{target}/programs/{program}", bundle.lowered(target, program)
        found += [(folder / "lowered.json", LoweredProgram), (folder / record.forward, Graph)]
        found += [(folder / record.backward, Graph)] if record.backward else []
        found += [(bundle.root / f"targets/{target}/kernels/kernels.json", KernelLibrary)]
    return found


@each_golden
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_run_by_a_target_or_saving_no_more_than_it_must_gives_what_eager_gave(golden):
    bundle = aotexport_runtime.open_bundle(golden / "bundle")
    programs = [bundle.program(name) for name in bundle.program_names]
    for options in ({"target": "portable"}, {"target": "autograd"}, {"target": "portable", "memory_budget": 0.0}):
        by_forward = options["target"] == "autograd"
        exempt = {p.name for p in programs if by_forward and p.grad and not p.forward.differentiable}
        results = run_vectors(golden / "bundle", **options, tensor_types=TYPES)
        assert {result.program for result in results} == set(bundle.program_names)
        failures = [line for r in results if r.program not in exempt for line in describe_failures(r)]
        assert (options, failures) == (options, [])


@pytest.mark.parametrize(
    "golden", [path for path in GOLDENS if any(path.glob("bundle/*.onnx"))], ids=attrgetter("name")
)
def test_golden_run_by_onnx_runtime_gives_what_eager_gave(golden):
    bundle = aotexport_runtime.open_bundle(golden / "bundle")
    for model in bundle.manifest.onnx:
        comparisons = check_model(bundle, bundle.program(model.program), model)
        assert {"call 0: output", "call 1: output"} <= {comparison.name for comparison in comparisons}


@each_golden
def test_golden_is_small_fits_the_json_schemas_and_is_written_again_to_the_same_bytes(golden):
    bundle = aotexport_runtime.open_bundle(golden / "bundle")
    assert parse_version(bundle.manifest.format) == parse_version(golden.parent.name.removeprefix("v"))
    assert sum(path.stat().st_size for path in golden.rglob("*") if path.is_file()) < 2 * MAX_NBYTES
    assert sum(entry.nbytes for entry in bundle.manifest.files) < MAX_NBYTES
    assert text_of(bundle) == (golden / "expected.txt").read_text(encoding="utf-8")
    for path, type_ in documents(golden):
        data = path.read_bytes()
        schema_of(type_).validate(json.loads(data))
        written = again(data, type_)
        in_full_too = json.dumps(in_full(decode_record(data, type_, where=path.name))).encode()
        assert again(in_full_too, type_) == written, path.name
        if golden.parent.name == "v1.0" and type_ is Graph:
            # Format 1.0 has no tables.
            whole = without_tables(json.loads(written))
            assert json.dumps(whole, sort_keys=True) == json.dumps(json.loads(data), sort_keys=True)
            data = again(written, Graph)
        assert written == data, path.name


@functools.cache
def schema_of(type_: type) -> jsonschema.Draft202012Validator:
    text = (HERE.parents[1] / f"schemas/v1/{SCHEMAS[type_]}.schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


def again(data: bytes, type_: type) -> bytes:
    return encode_record(decode_record(data, type_, where="x"), indent=type_ not in COMPACT)


def in_full(value: Any) -> Any:
    """Return a record as JSON that leaves no default out."""
    if isinstance(value, Record):
        config = type(value).__struct_config__
        fields = {name: in_full(getattr(value, name)) for name in type(value).__struct_fields__}
        return fields if config.tag is None else {config.tag_field: config.tag, **fields}
    if isinstance(value, dict):
        return {key: in_full(item) for key, item in value.items()}
    return [in_full(item) for item in value] if isinstance(value, list | tuple) else value


def test_cases_are_the_goldens_of_the_current_format_and_those_that_are_called():
    current = {golden.name for golden in GOLDENS if golden.parent.name == f"v{format_version(FORMAT_VERSION)}"}
    assert set(CASES) == current | {case["golden"] for case in CALLS.values()}


def test_goldens_cover_every_arm_but_those_with_a_reason():
    files = [file for golden in GOLDENS for file in documents(golden)]
    records = [msgspec.json.decode(path.read_bytes(), type=type_) for path, type_ in files]
    seen = set().union(*map(arms_of, records))
    assert all_arms() - seen == set(UNCOVERED)


def noted_in_the_prose() -> dict[str, re.Pattern[str]]:
    """Return a pattern for every name that the prose lists of what a recorded call notes."""
    prose = (HERE.parents[1] / "schemas/beyond.md").read_text(encoding="utf-8")
    rows = prose.partition("| noted | what |\n")[2].split("\n\n")[0].splitlines()[1:]
    shapes = {"call 0": r"call \d+", "<output>": r"output\S*", "<argument>": r"\S+", "<name>": r"\S+"}
    patterns: dict[str, re.Pattern[str]] = {}
    for listed in [row.split("`")[1] for row in rows]:
        pattern = listed
        for word, shape in shapes.items():
            pattern = pattern.replace(word, shape)
        patterns[listed] = re.compile(pattern + r"(\.\w+)*( norm)?")
    return patterns


def test_what_goldens_note_is_what_the_prose_lists():
    patterns = noted_in_the_prose()
    files = [path for golden in GOLDENS for path, type_ in documents(golden) if type_ is Vector]
    records = [decode_record(path.read_bytes(), Vector, where=path.name) for path in files]
    names = {name for record in records for name in (*record.facts, *record.values)}
    used = {name: [listed for listed, pattern in patterns.items() if pattern.fullmatch(name)] for name in names}
    assert [name for name, listed in used.items() if not listed] == []
    assert set(patterns) - {one for listed in used.values() for one in listed} == {"call 0: backward"}


def test_file_from_the_future_is_refused_with_both_versions_and_both_remedies():
    assert refusal(BundleTooNew, aotexport_runtime.open_bundle, HERE / "future") == (
        "bundle.json: this bundle has format 7.2 and needs a reader of format 7.1 or newer; this runtime reads up to "
        "1.1. Install a newer aotexport-runtime, or export the model again with an aotexport that writes format 1.1"
    )


def test_regenerate_of_a_released_version_is_refused(tmp_path):
    (tmp_path / f"{format_version(FORMAT_VERSION)}.json").write_text("{}")
    said = refusal(SystemExit, regenerate, [], tmp_path, released=tmp_path)
    assert said == "format 1.1 is released: its goldens stay as they are; raise FORMAT_VERSION first"
    assert [path.name for path in tmp_path.iterdir()] == ["1.1.json"]


def test_regenerate_of_an_unknown_case_is_refused(tmp_path):
    said = refusal(SystemExit, regenerate, ["linear", "nonsense"], tmp_path, released=tmp_path)
    assert said == f"no case nonsense; there are {', '.join(CASES)}"
