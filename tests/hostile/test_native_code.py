"""Native code of a bundle: none is loaded without trust."""

import json
from pathlib import Path

import pytest

from aotexport_runtime import NotSupported, load
from tests.hostile.crafted import Crafted

GOLDEN = Path(__file__).parents[1] / "golden/v1.0/kernels/bundle"


def test_kernels_without_trust_are_refused():
    with pytest.raises(NotSupported) as caught:
        load(GOLDEN, target="cuda")
    assert str(caught.value) == "kernels are native code, which runs only with `trust='native'`"


def test_library_is_never_read_without_trust(crafted: Crafted, monkeypatch):
    folder, half = "targets/cpu-x86_64-v3", {"inputs": [], "results": []}
    program = {"program": "train", "partition": "default", "forward": {"file": "f.so", **half}}
    record = {"name": "cpu-x86_64-v3", "requirements": {"kind": "cpu", "level": "x86_64-v3", "torch": "2.13"}}
    record |= {"programs": [{**program, "backward": {"file": "b.so", **half}}]}
    (crafted.root / folder).mkdir(parents=True)
    crafted.put("manifest", "programs/0/targets", ["portable", "cpu-x86_64-v3"])
    for name, data in (("target.json", json.dumps(record).encode()), ("f.so", b"no library"), ("b.so", b"no library")):
        crafted.write(f"{folder}/{name}", data)
        crafted.put("manifest", "files/-", {"path": f"{folder}/{name}", "nbytes": 0, "sha256": "0" * 64})
    monkeypatch.setattr("aotexport_runtime.engines.cpu.engine.Library", lambda *args: pytest.fail("it was loaded"))
    assert "train" in load(crafted.seal()).bundle.program_names
