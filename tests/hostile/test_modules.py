"""Submodules and their calls: out of order, within themselves, over nodes and values that are not there."""

import pytest

from aotexport_runtime import load
from tests.hostile.crafted import Crafted

WHERE = "programs/train/forward.json"
MAPPING = {"kind": "mapping", "type": "dict", "keys": [], "items": []}
NOTHING = {"kind": "sequence", "type": "tuple", "items": []}
LEAF = {"kind": "leaf", "index": 0}
PAIR = {"kind": "sequence", "type": "tuple", "items": [{**NOTHING, "items": [LEAF]}, MAPPING]}
CALL = {"module": 0, "begin": 0, "end": 1, "arguments": PAIR, "result": LEAF, "values": ["input:x"]}


def attributes(key: object) -> dict[str, object]:
    return {**MAPPING, "keys": [key], "items": [{"kind": "constant", "value": 1}]}


MODULES = [
    ([{"name": ""}, {"name": ""}], "`Submodule.name` '' occurs twice"),
    ([{"name": "linear.a"}], "submodule 'linear.a' does not follow the one that it is in"),
    (
        [{"name": ""}, {"name": "a"}, {"name": "b"}, {"name": "a.c"}],
        "submodule 'a.c' does not follow the one that it is in",
    ),
    ([{"name": ""}, {"name": "a..b"}], "submodule 'a..b' is malformed"),
    ([{"name": ""}, {"name": "__dict__"}], "submodule '__dict__' is malformed"),
    ([{"name": ""}, {"name": "\x1b[2J"}], r"submodule '\x1b[2J' is too long or not printable"),
    ([{"name": ""}, {"name": "calls"}], "'calls' is the name of a state tensor and of a module"),
    ([{"name": ""}, {"name": "a", "same_as": ""}], "submodule 'a' is the same as none before it"),
    ([{"name": ""}, {"name": "a", "same_as": "a"}], "submodule 'a' is the same as none before it"),
    ([{"name": ""}, {"name": "a"}, {"name": "a.b", "same_as": "a"}], "submodule 'a.b' is the same as none before it"),
    ([{"name": ""}, {"name": "a", "absent": ["_modules"]}], "submodule 'a' has a malformed attribute '_modules'"),
    ([{"name": ""}, {"name": "a", "absent": ["x y"]}], "submodule 'a' has a malformed attribute 'x y'"),
    (
        [{"name": ""}, {"name": "a", "type": "Linear", "attributes": attributes("forward")}],
        "submodule 'a' has a malformed attribute 'forward'",
    ),
    (
        [{"name": ""}, {"name": "a", "type": "Linear", "attributes": attributes("__class__")}],
        "submodule 'a' has a malformed attribute '__class__'",
    ),
    (
        [{"name": ""}, {"name": "a", "type": "Linear", "attributes": attributes(1)}],
        "submodule 'a' has a malformed attribute '1'",
    ),
    (
        [{"name": ""}, {"name": "a", "type": "Linear", "attributes": NOTHING}],
        "attributes of submodule 'a' are no mapping",
    ),
    (
        [{"name": ""}, {"name": "a", "type": "Linear", "attributes": {**MAPPING, "keys": ["x"], "items": [LEAF]}}],
        "leaf 0 of a tree is out of range",
    ),
]


@pytest.mark.parametrize(("modules", "message"), MODULES, ids=[message[:60] for _, message in MODULES])
def test_submodules_with_a_fault_are_refused(crafted: Crafted, modules, message):
    crafted.put("manifest", "modules", modules)
    assert crafted.refusal() == f"bundle.json: {message}"


RUN = "call 0 of a submodule is no run of nodes after the one before it, in the one around it"
CALLS = [
    ({"module": 9}, "`ModuleCall.module` is 9, out of range(1)"),
    ({"begin": -1}, "`ModuleCall.begin` is -1; at least 0 is expected"),
    ({"end": 99}, RUN),
    ({"begin": 2, "end": 1}, RUN),
    ({"parent": 0}, "parent of call 0 of a submodule is 0, out of range(0)"),
    ({"values": ["nothing"]}, "value 'nothing' is used before it is defined"),
    ({"values": []}, "leaf 0 of a tree is out of range"),
    ({"values": ["linear"], "begin": 0}, "call 0 of a submodule takes or returns a value that is computed after it"),
    ({"arguments": NOTHING}, "arguments of call 0 of a submodule are no pair of positional and keyword arguments"),
    ({"arguments": None}, "call 0 of a submodule has no structure, and no reason why"),
    ({"refusal": "\x1b[2J"}, r"`ModuleCall.refusal` '\x1b[2J' is too long or not printable"),
]


@pytest.mark.parametrize(("fields", "message"), CALLS, ids=[message[:60] for _, message in CALLS])
def test_call_of_a_submodule_with_a_fault_is_refused(crafted: Crafted, fields, message):
    crafted.put("forward", "calls", [{**CALL, **fields}])
    assert crafted.refusal() == f"{WHERE}: {message}"


def test_calls_that_overlap_are_refused(crafted: Crafted):
    crafted.put("forward", "calls", [{**CALL, "end": 3}, {**CALL, "begin": 2, "end": 4}])
    assert crafted.refusal() == f"{WHERE}: {RUN.replace('call 0', 'call 1')}"


def test_submodule_of_a_class_that_is_not_known_is_one_of_the_models(crafted: Crafted):
    crafted.put("manifest", "modules", [{"name": ""}, {"name": "linear", "type": "os.system"}])
    crafted.seal()
    assert type(load(crafted.root).linear).__name__ == "LoadedSubmodule"
