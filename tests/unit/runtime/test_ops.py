"""Operators by name, and when a schema of another torch release means the same call."""

import pytest
import torch

from aotexport_runtime import BundleInvalid, NotSupported
from aotexport_runtime.allowed.operators import BUILTINS, INFIX, OPERANDS, VIEWS, allowed_aten_operators
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.execution.higher_order import EFFECTS
from aotexport_runtime.execution.ops import ADAPTERS, is_compatible, resolve
from aotexport_runtime.rewrite.names import ENTER_CHECKPOINT, EXIT_CHECKPOINT
from tests.refusals import refusal

NOWHERE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "aten::from_file.default",
            "operator `aten::from_file.default` is not on the list of operators that a bundle may call",
        ),
        ("python::eval", "operator `python::eval` is not on the list of operators that a bundle may call"),
    ],
)
def test_operator_that_no_bundle_may_call_is_refused(name, message):
    assert refusal(BundleInvalid, resolve, name, None, NOWHERE) == message


def test_custom_operator_that_is_not_registered_is_refused_with_the_way_out():
    assert refusal(NotSupported, resolve, "mylib::op.default", None, frozenset({"mylib"})) == (
        "operator `mylib::op.default` is not registered: import the package that registers namespace `mylib` "
        "before loading"
    )


@pytest.mark.parametrize(
    ("captured", "current", "compatible"),
    [
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x) -> Tensor", True),
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x, *, int n=1) -> Tensor", True),
        ("a::f(Tensor x, *, int m=0) -> Tensor", "a::f(Tensor x, int m=0) -> Tensor", True),
        ("a::f(Tensor x, int n) -> Tensor", "a::f(Tensor x, SymInt n, SymInt m=0) -> Tensor", True),
        (
            "aten::_cdist_backward(Tensor grad, int n) -> Tensor",
            "aten::_cdist_backward(Tensor grad_output, int n) -> Tensor",
            True,
        ),
        ("aten::f(Tensor grad, int n) -> Tensor", "aten::f(Tensor grad_output, int n) -> Tensor", False),
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x, int n) -> Tensor", False),
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x) -> Tensor[]", False),
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor(a!) x) -> Tensor", False),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x, int n=2) -> Tensor", False),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x) -> Tensor", False),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x, int m=0, int n=1) -> Tensor", False),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x, *, int n=1) -> Tensor", False),
        ("a::f(Tensor x", "a::f(Tensor x) -> Tensor", False),
    ],
)
def test_schema_is_compatible_only_if_every_captured_call_means_the_same(captured, current, compatible):
    assert is_compatible(captured, current) is compatible


def test_every_builtin_has_a_number_of_operands():
    assert {name for name in OPERANDS if name.startswith("python::")} == {*BUILTINS, *INFIX}
    assert {name for name in OPERANDS if name.startswith("torch::")} == {*EFFECTS, ENTER_CHECKPOINT, EXIT_CHECKPOINT}


def test_every_view_is_an_allowed_operator_that_makes_views():
    allowed = {name.partition(".")[0] for name in allowed_aten_operators()}
    assert allowed >= VIEWS
    schemas = [str(getattr(torch.ops.aten, name).default._schema) for name in ("alias", "t", "permute", "as_strided")]
    assert all("(Tensor(a) self" in schema for schema in schemas)


def test_signature_of_every_listed_operator_is_read_as_torch_has_it():
    for name in allowed_aten_operators():
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is None:
            assert f"{base}.default" in ADAPTERS
            continue
        schema = getattr(packet, overload)._schema
        found = signature_of(str(schema))

        assert found is not None
        parameters = [*found.positional, *found.keyword_only]
        assert [each.name for each in parameters] == [each.name for each in schema.arguments]
        assert [each.default is None for each in parameters] == [not e.has_default_value() for e in schema.arguments]
        assert len(found.returns) == len(schema.returns)
