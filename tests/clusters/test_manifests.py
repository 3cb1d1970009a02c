"""The manifests for Kubernetes, against the types that KServe's and Kubernetes' clients are generated to."""

import importlib
from pathlib import Path

import pytest
import yaml

kserve = pytest.importorskip("kserve", reason="needs the extra `serve`")

EXAMPLE = Path(__file__).parents[2] / "examples/serving/kserve"
pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "file": str}
PLAIN["V1beta1MetricQuantity"] = str  # KServe generates no type for it


def faults(value, kind, where="$"):
    """Return the fields of a manifest that the API does not know, or knows as something else."""
    if kind.lower().startswith("list["):
        if not isinstance(value, list):
            return [f"{where}: expected a list"]
        return [fault for index, each in enumerate(value) for fault in faults(each, kind[5:-1], f"{where}[{index}]")]
    if kind.lower().startswith(("dict(", "dict[")):
        inner = kind[5:-1].split(", ")[1]
        return [fault for key, each in value.items() for fault in faults(each, inner, f"{where}.{key}")]
    if kind in PLAIN:
        return [] if isinstance(value, PLAIN[kind]) else [f"{where}: expected {kind}"]
    return faults_of_record(value, named(kind), where)


def faults_of_record(value, record, where):
    fields = {json: field for field, json in record.attribute_map.items()}
    found = [f"{where}.{key}: no such field" for key in value if key not in fields]
    given = {fields[key]: each for key, each in value.items() if key in fields}
    try:
        record(**given)  # raises where a field is missing that has to be there
    except ValueError as error:
        found.append(f"{where}: {error}")
    kinds = record.openapi_types
    return found + [fault for field, each in given.items() for fault in faults(each, kinds[field], f"{where}.{field}")]


def named(kind):
    for package in ("kserve", "kubernetes.client"):
        found = getattr(importlib.import_module(package), kind, None)
        if found is not None:
            return found
    raise AssertionError(f"no type {kind}")


@pytest.mark.parametrize(
    ("file", "kind"), [("runtime.yaml", "V1alpha1ClusterServingRuntime"), ("digits.yaml", "V1beta1InferenceService")]
)
def test_manifest_is_of_the_api(file, kind):
    assert faults(yaml.safe_load((EXAMPLE / file).read_text()), kind) == []


def test_manifest_with_faults_is_not_of_the_api():
    manifest = yaml.safe_load((EXAMPLE / "digits.yaml").read_text())
    manifest["spec"]["predictor"] |= {"minReplicas": "two", "replicas": 3}
    manifest["spec"]["predictor"]["model"]["ports"] = [{"name": "http"}]
    assert [fault.split(":")[0] for fault in faults(manifest, "V1beta1InferenceService")] == [
        "$.spec.predictor.replicas",
        "$.spec.predictor.min_replicas",
        "$.spec.predictor.model.ports[0]",
    ]
