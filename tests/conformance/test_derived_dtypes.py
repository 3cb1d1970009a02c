"""Derived bundles of every case in another dtype: what an export of the cast model records, or a refusal."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aotexport
from aotexport.model.cast import cast
from aotexport.model.programs import Example, ModelSource
from aotexport_runtime import load, selftest
from tests.cases import all_cases
from tests.cases.operators import NAMESPACE
from tests.cases.subclasses import TYPES
from tests.conformance.test_derive import REFUSED as REFUSED_AT_ALL
from tests.conformance.test_derive import ROUNDED

REFUSED = (
    # Arguments are arrays, which NumPy does not have in bfloat16.
    *("arrays_changed_by_the_call", "computed_by_functions_of_numpy", "converted_in_the_call"),
    "one_array_as_two_arguments",
    # Graphs name a dtype, or read a tensor of one.
    *("attention_with_scores", "autocast_dropout", "autocast_region", "constants_of_every_kind", "nested_autocast"),
    *("device_with_an_index", "forward_jacobians_of_a_jacobian", "function_for_mixed_precision", "hessian_inside"),
    *("laplacian", "scalar_tensors", "tensor_attribute_in_place", "tensor_attribute_replaced"),
    *("write_to_a_class_attribute", "write_to_a_global", "pooled_channels_that_are_last", "sampled_where_a_grid_says"),
    "tensors_of_sizes",
    # Tensor subclasses were captured for one dtype.
    *("custom_function_of_subclasses", "mutated_subclass", "nested_subclass", "parts_of_a_subclass"),
    *("subclass_itself_and_its_views", "subclass_made_of_arguments", "subclass_with_dense", "subclass_with_gradients"),
    *REFUSED_AT_ALL,
)
"""Cases of which no bundle in bfloat16 is derived, though eager computes in it."""

NOT_CAST = (
    *(
        "dataclass_of_the_caller",
        "dataclass_record",
        "dataclass_with_more_than_its_fields",
        "numbers_and_bytes_as_keys",
    ),
    *("objects_made_by_code", "objects_of_own_classes"),
    "variadic",
)
"""Cases whose records differ: an export casts no tensors in objects; a derived bundle has a name for each keyword."""

UNSTABLE = "maps_of_one_pixel"
"""Case whose gradient of a weight differs from run to run in eager: oneDNN 3.12 reads memory that nobody wrote."""


def exported_in_bfloat16(case: Any, path: Path) -> bool:
    """Export the cast model of a case; return whether that can be exported."""
    target, args, kwargs = case.make()
    source = ModelSource("", target, Example(args, kwargs), Path())
    source = cast(source, torch.bfloat16)
    options = {"verify": False} | case.options
    try:
        aotexport.export(target, source.example.args, source.example.kwargs, output=path, **options)
    except aotexport.AotExportError:
        return False
    return True


def calls(bundle: Path) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Return the recorded calls by name."""
    return {
        path.stem: (json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))
        for path in sorted((bundle / "testvectors").glob("*.json"))
    }


def same_arguments(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    inputs = {key for key in one if not key.startswith("v")}
    return inputs == {key for key in other if not key.startswith("v")} and all(
        torch.equal(one[key], other[key]) for key in inputs
    )


@dataclasses.dataclass
class Compared:
    """How many recorded calls had the same arguments, and so were compared."""

    count: int = 0


def compare(found: Path, expected: Path, *, rounded: bool) -> Compared:
    """Compare recorded calls of the same arguments; others are of drawn ones."""
    ours, theirs, compared = calls(found), calls(expected), Compared()
    for name in ours.keys() & theirs.keys():
        (record, tensors), (wanted, values) = ours[name], theirs[name]
        if not same_arguments(tensors, values):
            continue
        compared.count += 1
        assert record["facts"] == wanted["facts"], name
        tolerances = {"rtol": 0.05, "atol": 0.05} if rounded else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(tensors, values, equal_nan=True, **tolerances)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in all_cases() if case.name != UNSTABLE], ids=lambda case: case.name)
def test_bundle_of_every_case_begets_one_in_bfloat16(case, tmp_path):
    with warnings.catch_warnings():
        # Operators with bodies make torch compile, which warns of its own deprecations.
        warnings.simplefilter("ignore")
        target, args, kwargs = case.make()
        options = {"verify": False} | case.options
        aotexport.export(target, args, kwargs, output=tmp_path / "base", **options)
        in_eager = exported_in_bfloat16(case, tmp_path / "expected")
        module = load(tmp_path / "base", tensor_types=TYPES, operator_namespaces=[NAMESPACE])
        try:
            aotexport.derive(module, output=tmp_path / "derived", dtype=torch.bfloat16, verify=options["verify"])
        except aotexport.AotExportError:
            assert case.name in REFUSED or not in_eager
            return
    assert case.name not in REFUSED
    if in_eager and case.name not in NOT_CAST:
        assert compare(tmp_path / "derived", tmp_path / "expected", rounded=case.name in ROUNDED).count
    for tuned in ("autograd", "portable"):
        selftest(tmp_path / "derived", target=tuned, tensor_types=TYPES, operator_namespaces=[NAMESPACE])
