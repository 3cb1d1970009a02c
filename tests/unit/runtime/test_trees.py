"""Values rebuilt from trees: the containers that a caller sees."""

import pytest
import torch
from torch.utils import _pytree as pytree  # noqa: TID251

from aotexport_runtime import BundleInvalid, NotSupported
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence
from aotexport_runtime.values.trees import builder, leaves
from tests.refusals import refusal

ITEMS = (Leaf(index=1), Constant(value=None), Leaf(index=0))


def build(tree):
    return builder(tree, lambda constant: constant.value)(["zero", "one"])


def fields(type_, *names, items=ITEMS, name="Result"):
    return NamedFields(type=type_, name=name, fields=names, items=items)


def test_model_output_has_keys_attributes_and_positions_without_what_is_none():
    value = build(fields("model_output", "a", "b", "c"))
    assert (value["c"], value.c, value[1], value[0:2]) == ("zero", "zero", "zero", ("one", "zero"))
    assert list(value) == ["a", "c"]
    assert value.b is None
    with pytest.raises(AttributeError):
        value.__nothing__  # noqa: B018


@pytest.mark.parametrize("name", ["inspect", "all_return_types", "pytree_register_structseq", "nothing"])
def test_name_of_torchs_that_is_no_return_type_is_refused(name):
    said = refusal(NotSupported, build, fields("return_type", "a", "b", items=ITEMS[:2], name=name))
    assert said == f"this torch ({torch.__version__}) has no return type `{name}`"


def test_return_type_with_other_fields_is_refused():
    said = refusal(BundleInvalid, build, fields("return_type", "a", "b", "c", name="max"))
    assert said == "return type `max` does not have 3 fields"


def test_leaves_have_the_paths_of_python():
    tree = Mapping(type="dict", keys=("a", 2), items=(fields("namedtuple", "x", "y", "z"), Leaf(index=3)))
    assert [path for path, _ in leaves(tree, "batch")] == ["batch['a'].x", "batch['a'].y", "batch['a'].z", "batch[2]"]


# --- torch's pytrees ------------------------------------------------------------------------------------------

NODES = {
    "dict": Mapping(type="dict", keys=("a", "b"), items=ITEMS[::2]),
    "list": Sequence(type="list", items=ITEMS[::2]),
    "list of its own": Sequence(type="list", items=ITEMS[::2], name="Layers"),
    "tuple of its own": Sequence(type="tuple", items=ITEMS[::2], name="Pair"),
    "named tuple": fields("namedtuple", "a", "b", items=ITEMS[::2]),
    "dataclass": fields("dataclass", "a", "b", items=ITEMS[::2]),
    "object": fields("object", "a", "b", items=ITEMS[::2]),
    "model output": fields("model_output", "a", "b", items=ITEMS[::2]),
    "torch's return type": fields("return_type", "values", "indices", items=ITEMS[::2], name="max"),
}


@pytest.mark.parametrize("tree", NODES.values(), ids=NODES)
def test_container_is_a_node_of_torchs_pytrees(tree):
    value = build(tree)

    items, structure = pytree.tree_flatten(value)
    assert items == ["one", "zero"]
    again = pytree.tree_unflatten(items, structure)
    assert type(again) is type(value)
    assert again == value
    assert [key.get(value) for (key,), _ in pytree.tree_flatten_with_path(value)[0]] == items
    assert pytree.tree_structure(build(tree)) == structure
