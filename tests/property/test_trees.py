"""Nested values: what a tree builds is what a call with that structure is flattened to."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aotexport_runtime.errors import Place
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Parameter
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.validate.trees import check_tree
from aotexport_runtime.values.trees import builder, leaves
from tests.property.profile import quick

names = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True).map(lambda name: f"f_{name}")
keys = names | st.integers(-3, 3) | st.none()
constants = st.sampled_from([None, True, 0, 1.5]).map(lambda value: Constant(value=value))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=4)
    named = st.lists(st.tuples(names, inner), max_size=4, unique_by=lambda pair: pair[0])
    keyed = st.lists(st.tuples(keys, inner), max_size=4, unique_by=lambda pair: pair[0])
    return st.one_of(
        st.builds(
            lambda type_, items: Sequence(type=type_, items=tuple(items)), st.sampled_from(["tuple", "list"]), items
        ),
        st.builds(_mapping, st.sampled_from(["dict", "ordered_dict"]), keyed),
        st.builds(_fields, st.sampled_from(["namedtuple", "dataclass"]), named),
    )


def _mapping(type_: Any, pairs: list[tuple[Any, Tree]]) -> Mapping:
    return Mapping(type=type_, keys=tuple(k for k, _ in pairs), items=tuple(item for _, item in pairs))


def _fields(type_: Any, pairs: list[tuple[str, Tree]]) -> NamedFields:
    return NamedFields(
        type=type_, name="Record", fields=tuple(n for n, _ in pairs), items=tuple(item for _, item in pairs)
    )


trees = st.recursive(st.just(Leaf(index=0)) | constants, _containers, max_leaves=10)


def numbered(tree: Any, count: list[int]) -> Any:
    """Return `tree` with leaves 0, 1, 2, ... in order."""
    if isinstance(tree, Leaf):
        count[0] += 1
        return Leaf(index=count[0] - 1)
    if isinstance(tree, Constant):
        return tree
    items = tuple(numbered(item, count) for item in tree.items)
    return type(tree)(**{**{f: getattr(tree, f) for f in tree.__struct_fields__}, "items": items})


@quick
@given(trees)
def test_value_that_a_tree_builds_is_flattened_to_the_same_leaves(tree):
    count = [0]
    tree = numbered(tree, count)
    check_tree(tree, count[0], where=Place("test"))
    values = [object() for _ in range(count[0])]
    value = builder(tree, lambda constant: constant.value)(values)
    parameter = Parameter(name="x", kind="positional_only", tree=tree)
    flat: list[Any] = [None] * count[0]
    assert Signature((parameter,), lambda constant: constant.value).flatten((value,), {}, flat) == []
    assert flat == values


@quick
@given(trees)
def test_paths_of_leaves_are_all_different(tree):
    paths = [path for path, _ in leaves(tree, "x")]
    assert len(set(paths)) == len(paths)
