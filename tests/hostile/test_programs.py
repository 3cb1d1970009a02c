"""Programs: indices, names and symbols that point nowhere, trees that are no containers."""

import pytest

from tests.hostile.crafted import Crafted

DIMENSION = {"symbol": "s1", "name": "n", "min": 0, "input_index": 3, "axis": 0}
TENSOR = {"kind": "tensor", "dtype": "float32", "shape": [3], "stride": [1]}
STATE_INPUT = {"kind": "state", "name": "linear.bias", "meta": TENSOR}
VIEW = "functional/outputs/2"
GRADIENTS = "functional/gradients"
CHECK = {"of": "input", "index": 0, "tangents": [0]}
STEP = {"op": "aten::t.default"}
LEAF = {"kind": "leaf", "index": 0}
LONG = 1 << 70

FAULTS = [
    ("name", "infer", "it is of program 'infer', not `train`"),
    ("method", "__class__", "method '__class__' is no name of a method"),
    ("method", "a b", "method 'a b' is no name of a method"),
    ("method", "a\x1b", r"method 'a\x1b' is no name of a method"),
    # inputs and dimensions
    ("inputs/0", {**STATE_INPUT, "name": "secret"}, "input 'secret' is not in the manifest's state"),
    (
        "inputs/0",
        {**STATE_INPUT, "meta": {**TENSOR, "shape": [4]}},
        "input 'linear.bias' is not what the manifest's state says",
    ),
    (
        "inputs/0",
        {**STATE_INPUT, "meta": {**TENSOR, "dtype": "int64"}},
        "input 'linear.bias' is not what the manifest's state says",
    ),
    ("inputs/3/path", "x\x1b[2J", r"`ArgumentInput.path` 'x\x1b[2J' is too long or not printable"),
    ("inputs/3/meta/shape/0", "s99", "unknown symbol 's99' in a size"),
    ("inputs/3/meta/stride", [1], "a tensor has 2 sizes and 1 strides; at most 64 are read"),
    ("inputs/3/meta/device", "meta", "Invalid enum value 'meta' - at `$.inputs[3].meta.device`"),
    ("dimensions/-", {**DIMENSION, "symbol": "s33"}, "`Dimension.symbol` 's33' occurs twice"),
    ("dimensions/-", {**DIMENSION, "input_index": 4}, "`Dimension.input_index` is 4, out of range(4)"),
    ("dimensions/-", {**DIMENSION, "input_index": 0}, "a dimension is read from a state tensor"),
    ("dimensions/-", {**DIMENSION, "axis": 2}, "axis of a dimension is 2, out of range(2)"),
    ("dimensions/-", {**DIMENSION, "axis": -1}, "`Dimension.axis` is -1; at least 0 is expected"),
    ("dimensions/-", {**DIMENSION, "factor": 0}, "a dimension has factor 0"),
    (
        "dimensions/-",
        {**DIMENSION, "max": LONG},
        "`Dimension.max` is 1180591620717411303424; at most 9223372036854775807 is expected",
    ),
    # signature
    ("parameters/0/default", {"kind": "constant", "value": "input:x"}, "a constant of a tree is no constant"),
    ("parameters/0/tree", {**LEAF, "array": True}, "input 0 is an array, and no plain argument without gradients"),
    (
        "output_tree",
        {"kind": "sequence", "type": "list", "items": [LEAF, {**LEAF, "array": True}]},
        "output 0 is an array in one place, and none in another",
    ),
    ("parameters/0/tree/index", 4, "leaf 4 of a tree is out of range"),
    ("parameters/0/tree/index", -1, "leaf -1 of a tree is out of range"),
    ("parameters/0/kind", "var_positional", "parameter `x` is var_positional and no sequence"),
    ("parameters/0/kind", "var_keyword", "parameter `x` is var_keyword and no mapping"),
    ("parameters/1/tree/value", "input:x", "a constant of a tree is no constant"),
    ("parameters/1/tree/value", {"kind": "size", "value": "s33"}, "a constant of a tree is no constant"),
    # outputs
    ("outputs/0/stride/0", {"op": "not", "args": ["s99"]}, "unknown symbol 's99' in a size"),
    ("output_tree/items/0/index", 3, "leaf 3 of a tree is out of range"),
    ("container_changes", [{"path": "y", "keys": [], "items": []}], "every call must pass the changed container 'y'"),
    ("rebinds", [{"name": "secret", "output_index": 0}], "`Rebind.name` 'secret' is not in `Manifest.state.name`"),
    # epilogues
    ("functional/outputs", [{"kind": "fresh"}], "`FunctionalGraph.outputs` has 1 items, and `Program.outputs` 3"),
    (
        "functional/intermediate_bases",
        LONG,
        f"`FunctionalGraph.intermediate_bases` is {LONG}; at most {2**63 - 1} is expected",
    ),
    ("functional/guards", [{"op": "eq", "args": ["s99", 1]}], "unknown symbol 's99' in a size"),
    (f"{VIEW}/steps/0/op", "aten::relu.default", "operator `aten::relu.default` of a view step is no view"),
    (
        f"{VIEW}/steps/0/op",
        "aten::from_file.default",
        "operator `aten::from_file.default` is not on the list of operators that a bundle may call",
    ),
    (
        f"{VIEW}/steps/0/op",
        "os::system",
        "operator `os::system` is in namespace `os`, which the manifest does not declare",
    ),
    (f"{VIEW}/steps/0/args", ["input:x"], "an argument of a view step is no constant"),
    (
        f"{VIEW}/steps/0",
        {"op": "aten::view.dtype", "args": [100]},
        "argument `dtype` of operator `aten::view.dtype` is no ScalarType",
    ),
    (f"{VIEW}/steps/0/item", 0, "`item` of a view step is set: no view has several results"),
    # gradients
    (f"{GRADIENTS}/partitions", [], "`Gradients.partitions` has 0 items; at least 1 must be there"),
    (f"{GRADIENTS}/tangents/0/index", 3, "index of a tangent is 3, out of range(3)"),
    (f"{GRADIENTS}/tangents/0/of", "intermediate_base", "index of a tangent is 0, out of range(0)"),
    (f"{GRADIENTS}/tangents/0/memory_format", None, "a tangent of 1 axes has no layout"),
    (f"{GRADIENTS}/tangents/0/memory_format", "channels_last", "a tangent of 1 axes has memory format channels_last"),
    (
        f"{GRADIENTS}/tangents/0/memory_format",
        "preserve_format",
        "a tangent of 1 axes has memory format preserve_format",
    ),
    (f"{GRADIENTS}/checks", [{**CHECK, "index": 4}], "checked input is 4, out of range(4)"),
    (f"{GRADIENTS}/checks", [{**CHECK, "of": "output", "index": 3}], "checked output is 3, out of range(3)"),
    (f"{GRADIENTS}/checks", [CHECK, CHECK], "`VersionCheck.of` and `VersionCheck.index` 'input 0' occurs twice"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS, ids=[f"{p}:{m[:40]}" for p, _, m in FAULTS])
def test_program_with_a_fault_is_refused(crafted: Crafted, path, value, message):
    crafted.put("program", path, value)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


def test_tangent_that_comes_twice_is_refused(crafted: Crafted):
    tangent = crafted.document("program")["functional"]["gradients"]["tangents"][0]
    crafted.put("program", f"{GRADIENTS}/tangents/-", tangent)
    assert crafted.refusal() == "programs/train/program.json: `Tangent.of` and `Tangent.index` 'output 0' occurs twice"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("functional/mutations/0/input_index", 3, "`InputMutation.input_index` is 3, which is no tensor"),
        (f"{GRADIENTS}/of_inputs/3", 4, "input of a gradient is 3, which is no tensor"),
        ("inputs/3/symbol", "s99", "unknown symbol 's99' in a size"),
    ],
)
def test_number_in_place_of_a_tensor_is_refused(crafted: Crafted, path, value, message):
    crafted.put("program", f"{VIEW}/input_index", 0)
    crafted.put("program", "inputs/3", {"kind": "size", "path": "x", "symbol": "s33"})
    crafted.put("program", path, value)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


UNFIT, NO_CHANGE = "the keys of the changed container 'x' do not fit", "the container 'x' cannot be changed so"


@pytest.mark.parametrize(
    ("kind", "keys", "items", "message"),
    [
        ("list", [0], [], UNFIT),
        ("list", [0], [None, None], UNFIT),
        ("list", [0, 0], [None, None], UNFIT),
        ("list", [1], [None], NO_CHANGE),
        ("list", [0, 1], [None, None], NO_CHANGE),
        ("list", [0], [{"kind": "leaf", "index": 3}], "leaf 3 of a tree is out of range"),
        ("tuple", [0], [None], NO_CHANGE),
    ],
)
def test_change_that_a_container_cannot_take_is_refused(crafted: Crafted, kind, keys, items, message):
    tree = crafted.document("program")["parameters"][0]["tree"]
    crafted.put("program", "parameters/0/tree", {"kind": "sequence", "type": kind, "items": [tree]})
    crafted.put("program", "inputs/3/path", "x[0]")
    crafted.put("program", "container_changes", [{"path": "x", "keys": keys, "items": items}])
    assert crafted.refusal() == f"programs/train/program.json: {message}"


@pytest.mark.parametrize(("path", "value", "message"), [])
def test_size_in_place_of_a_tensor_is_refused(crafted: Crafted, path, value, message):
    crafted.put("program", "outputs/1", None)
    crafted.put("program", path, value)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


def _fields(type_: str, name: str, fields: list[str]):
    items = [{"kind": "leaf", "index": index} for index in range(3)]
    return {"kind": "named_fields", "type": type_, "name": name, "fields": fields, "items": items}


TREES = [
    (_fields("namedtuple", "T", ["a", "b"]), "2 names for 3 items of a tree"),
    (_fields("namedtuple", "T", ["a", "b", "a"]), "a tree has a name twice"),
    (_fields("namedtuple", "T", ["a", "b", "c=print()"]), "the name 'c=print()' in a tree is no plain identifier"),
    (_fields("namedtuple", "T", ["a", "b", "_c"]), "the name '_c' in a tree is no plain identifier"),
    (
        _fields("namedtuple", "T): import os #", list("abc")),
        "the name 'T): import os #' in a tree is no plain identifier",
    ),
    (_fields("dataclass", "T", ["a", "b", "class"]), "the name 'class' in a tree is no plain identifier"),
    (_fields("dataclass", "T", ["a", "b", "__class__"]), "the name '__class__' in a tree is no plain identifier"),
    (_fields("dataclass", "T", ["a", "b", "__init__"]), "the name '__init__' in a tree is no plain identifier"),
    (_fields("model_output", "T", ["a", "b", ""]), "the name '' in a tree is no plain identifier"),
    (_fields("return_type", "__loader__", list("abc")), "the name '__loader__' in a tree is no plain identifier"),
    ({"kind": "mapping", "type": "dict", "keys": [1, True, "c"], "items": [LEAF] * 3}, "a tree has a name twice"),
    ({"kind": "mapping", "type": "dict", "keys": ["a"], "items": []}, "1 names for 0 items of a tree"),
    (
        {"kind": "mapping", "type": "dict", "keys": [[1, {"kind": "bytes", "hex": "0g"}]], "items": [LEAF]},
        "the bytes of a tree are no pairs of hexadecimal digits",
    ),
    (
        {"kind": "sequence", "type": "set", "items": [{"kind": "leaf", "index": 0}]},
        "a set of a tree holds something else than plain constants",
    ),
    (
        {"kind": "sequence", "type": "frozenset", "items": [{"kind": "constant", "value": [[1]]}]},
        "a set of a tree holds something else than plain constants",
    ),
    (
        {"kind": "sequence", "type": "deque", "items": [], "max_items": 1 << 63},
        "a sequence of a tree has more items than it may keep, or is no deque",
    ),
    (
        {"kind": "sequence", "type": "size", "items": [{"kind": "constant", "value": None}]},
        "a size of a tree holds something else than integers",
    ),
    (
        {"kind": "sequence", "type": "list", "items": [{"kind": "constant", "value": "best"}]},
        "a constant of a tree is no constant",
    ),
]


@pytest.mark.parametrize(("tree", "message"), TREES, ids=[message for _, message in TREES])
def test_output_tree_with_a_fault_is_refused(crafted: Crafted, tree, message):
    crafted.put("program", "output_tree", tree)
    assert crafted.refusal() == f"programs/train/program.json: {message}"


def test_array_of_an_element_type_that_numpy_has_not_is_refused(crafted: Crafted):
    crafted.put("program", "outputs/0/dtype", "bfloat16")
    crafted.put("program", "output_tree/items/0/array", True)
    message = "output 0 is an array, and NumPy has no such values"
    assert crafted.refusal() == f"programs/train/program.json: {message}"
