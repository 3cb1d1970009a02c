"""Negative bundles: each breaks one rule, and is refused with the code and the place that the format says."""

from __future__ import annotations

import shutil

import pytest

from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.codes import CODES
from tests.golden.refuse import CASES, edited_bundle

UNSHOWN = {
    "bundle-invalid": "every rule of the format has a code of its own",
    "bundle-limit": "such a bundle is large; tests/hostile/test_limits.py has stricter limits",
    "bundle-missing": "there is no bundle to publish; tests/unit/test_check.py",
    "file-outside": "a link cannot be published as JSON; tests/hostile/test_files.py",
    "onnx-malformed": "ONNX Runtime says so when it loads the model; tests/conformance/test_onnx.py",
    "signature-invalid": "signatures are beside the format; tests/writers",
}
"""Codes without a negative bundle, each with the reason."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_bundle_that_breaks_one_rule_is_refused_with_its_code_and_place(name, tmp_path):
    case = CASES[name]
    root = edited_bundle(case, tmp_path / name)

    (fault,) = faults_of(root)
    assert (fault.code, fault.where) == (case["code"], case["where"])
    # A reader may name a value within the place.
    assert fault.path == case["path"] or fault.path.startswith((f"{case['path']}.", f"{case['path']}["))
    if case["where"].startswith(("bundle.json", "programs/")) and case["code"] != "tensor-stored":
        with pytest.raises(BundleInvalid) as caught:
            open_bundle(root).read_graphs()
        assert (caught.value.code, caught.value.where) == (case["code"], case["where"])
    shutil.rmtree(root)


def test_every_code_has_a_negative_bundle_or_a_reason():
    assert {case["code"] for case in CASES.values()} | set(UNSHOWN) == set(CODES)
    assert {case["code"] for case in CASES.values()} & set(UNSHOWN) == set()
