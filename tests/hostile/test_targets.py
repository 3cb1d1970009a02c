"""Records of compiled targets that lie about the bundle; no library is loaded before its record has passed."""

import json
from typing import Any

import pytest

from aotexport_runtime import BundleInvalid, load, open_bundle
from tests.hostile.crafted import Crafted

NAME = "cpu-x86_64-v3"
WHERE = f"targets/{NAME}/target.json"


def record() -> dict[str, Any]:
    """Return a record that is right but for its library, which is no library."""
    half = {"inputs": [], "results": []}
    return {
        "name": NAME,
        "requirements": {"kind": "cpu", "level": "x86_64-v3", "torch": "2.13"},
        "programs": [
            {
                "program": "train",
                "partition": "default",
                "forward": {"file": "train.forward.so", **half},
                "backward": {"file": "train.backward.so", **half},
            }
        ],
    }


def sealed(crafted: Crafted, target: dict[str, Any], targets: tuple[str, ...] = ("portable", NAME)) -> Any:
    """Return the directory of the bundle with `target`."""
    crafted.put("manifest", "programs/0/targets", list(targets))
    for name in ("target.json", "train.forward.so", "train.backward.so"):
        path = f"targets/{NAME}/{name}"
        (crafted.root / path).parent.mkdir(parents=True, exist_ok=True)
        crafted.write(path, json.dumps(target).encode() if name == "target.json" else b"no library")
        crafted.put("manifest", "files/-", {"path": path, "nbytes": 0, "sha256": "0" * 64})
    return crafted.seal()


FAULTS = [
    ("name", "cuda", "it is of target 'cuda', not `cpu-x86_64-v3`"),
    ("requirements/torch", "2\n", r"`CpuRequirements.torch` '2\n' is too long or not printable"),
    ("programs/0/program", "infer", "it lacks program 'train', which the manifest says it has"),
    ("programs/0/forward/file", "x.so", "library 'x.so' is not listed in the manifest"),
    ("programs/0/partition", "other", "program `train` has no partition 'other'"),
    ("programs/0/partition", None, "program `train` has no partition 'None'"),
    ("programs/0/backward", None, "program `train` has no partition 'default'"),
    ("programs/0/undefined_tangents", [9], "`CompiledProgram.undefined_tangents` is 9, out of range(1)"),
    ("programs/0/undefined_tangents", [0, 0], "`CompiledProgram.undefined_tangents` '0' occurs twice"),
    ("programs/0/guards", [{"op": "eq", "args": ["s99", 2]}], "unknown symbol 's99' in a size"),
    ("programs/0/forward/inputs", ["nothing"], "'nothing' is no tensor of the functional graph"),
    ("programs/0/backward/results", ["nothing"], "'nothing' is no tensor of the functional graph"),
    ("refusals", [{"program": "train", "reason": ""}], "program 'train' occurs twice"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS, ids=[f"{p}:{m[:40]}" for p, _, m in FAULTS])
def test_target_with_a_fault_is_refused(crafted: Crafted, path, value, message):
    target: Any = record()
    *steps, last = path.split("/")
    place = target
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value

    with pytest.raises(BundleInvalid) as caught:
        open_bundle(sealed(crafted, target)).compiled(NAME, "train")

    assert str(caught.value) == f"{WHERE}: {message}"


def test_target_with_a_program_that_the_manifest_does_not_list_is_refused(crafted: Crafted):
    with pytest.raises(BundleInvalid) as caught:
        open_bundle(sealed(crafted, record(), targets=("portable",))).target(NAME)

    assert str(caught.value) == f"{WHERE}: the manifest does not say that it has program 'train'"


def test_target_with_an_unknown_field_is_refused(crafted: Crafted):
    with pytest.raises(BundleInvalid) as caught:
        open_bundle(sealed(crafted, {**record(), "constructor": "x"})).target(NAME)

    assert str(caught.value) == f"{WHERE}: Object contains unknown field `constructor`"


def test_native_file_is_never_read_without_trust(crafted: Crafted, monkeypatch):
    path = sealed(crafted, record())
    monkeypatch.setattr(
        "aotexport_runtime.engines.cpu.engine.Library", lambda *args: pytest.fail("a library was loaded")
    )

    module = load(path)

    assert "train" in module.bundle.program_names
