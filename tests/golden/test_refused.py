"""Negative bundles: each breaks one rule, and is refused by its check, with the code and place that the format says."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aotexport_runtime
from aotexport_runtime import Signed
from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.self_test import observe_vector
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.module.recorded import read_vector
from tests.golden.cases import TYPES
from tests.golden.refuse import CASES, HERE, edited_bundle

TABLE = json.loads((HERE.parents[1] / "schemas/v1/checks.json").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["check"]: row for row in TABLE["checks"]}


def run_calls(root: Path) -> None:
    bundle = open_bundle(root)
    for entry in bundle.manifest.testvectors:
        module = aotexport_runtime.load(root, target="portable", tensor_types=TYPES)
        observe_vector(module, *read_vector(bundle, entry))


LATER: dict[str, Callable[[Path], object]] = {
    "onnx": lambda root: aotexport_runtime.load(root, target="onnx"),
    "call": run_calls,
    "signature": lambda root: aotexport_runtime.load(root, trust=Signed(public_key=HERE / "refused/signer.pub")),
}
"""What refuses a bundle that `check` takes: these look at more than its files say."""


def faults(case: dict[str, Any], root: Path) -> list[BundleInvalid]:
    """Return what is wrong with a bundle."""
    edited_bundle(case, root)
    if "by" not in case:
        return faults_of(root)
    assert faults_of(root) == []
    with pytest.raises(BundleInvalid) as caught:
        LATER[case["by"]](root)
    return [caught.value]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if case.get("large") else ()) for name, case in CASES.items()]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore::DeprecationWarning")
def test_bundle_that_breaks_one_rule_is_refused_with_its_code_place_and_text(name, tmp_path):
    case, root = CASES[name], tmp_path / "bundle"
    (fault,) = faults(case, root)
    assert (fault.check, fault.code, fault.where) == (case["check"], case["code"], case["where"])
    assert str(fault).replace(str(root), "BUNDLE") == case["says"]
    # A reader may name a value within the place.
    assert fault.path == case["path"] or fault.path.startswith((f"{case['path']}.", f"{case['path']}["))
    if "by" not in case and case["where"].startswith(("bundle.json", "programs/")) and case["code"] not in UNREAD:
        with pytest.raises(BundleInvalid) as caught:
            open_bundle(root).read_graphs()
        assert (caught.value.check, caught.value.where) == (case["check"], case["where"])
    shutil.rmtree(root, ignore_errors=True)


UNREAD = ("tensor-stored", "onnx-malformed")
"""Codes of what is not looked at when graphs are read."""


def test_every_check_refuses_a_bundle_and_every_refusal_has_a_check():
    fired = {case["check"] for case in CASES.values()}
    assert {name for name in ROWS if name not in fired} == set()
    assert fired - set(ROWS) == set()
    assert {row["code"] for row in ROWS.values()} == set(TABLE["codes"])
    assert {name for name, case in CASES.items() if case["code"] != case["check"].partition("/")[0]} == set()


def test_every_check_of_the_runtime_is_in_the_table_and_the_other_way_round():
    runtime = Path(aotexport_runtime.__file__).parent
    sources = "\n".join(path.read_text(encoding="utf-8") for path in runtime.rglob("*.py"))
    codes = "|".join(TABLE["codes"])
    assert set(re.findall(rf'"((?:{codes})/[a-z-]+)"', sources)) == {
        name for name, row in ROWS.items() if not row.get("declared")
    }
    assert re.findall(r"(?:check=|BundleInvalid\([^()]*, )\"[a-z-]+\"", sources) == []
