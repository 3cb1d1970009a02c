"""Operators that no bundle may call, and calls that their schemas do not have."""

import pytest
import torch

from aotexport_runtime import BundleInvalid, NotSupported, load
from tests.hostile.crafted import Crafted

WHERE = "programs/train/forward.json"
NOT_LISTED = "is not on the list of operators that a bundle may call"

OPERATORS = {
    "aten::from_file.default": NOT_LISTED,
    "aten::set_.source_Storage": NOT_LISTED,
    "aten::set_.source_Storage_storage_offset": NOT_LISTED,
    "aten::_reshape_alias.default": NOT_LISTED,
    "aten::_sparse_coo_tensor_unsafe.default": NOT_LISTED,
    "aten::sparse_coo_tensor.indices": NOT_LISTED,
    "aten::_index_put_impl_.default": NOT_LISTED,
    "aten::_convert_weight_to_int4pack.default": NOT_LISTED,
    "aten::record_stream.default": NOT_LISTED,
    "aten::relu": NOT_LISTED,
    "aten::relu.nonsense": NOT_LISTED,
    "aten::__class__.default": NOT_LISTED,
    "aten::nonsense.default": NOT_LISTED,
    "prims::add.default": "is in namespace `prims`, which the manifest does not declare",
    "inductor::_reinterpret_tensor.default": "is in namespace `inductor`, which the manifest does not declare",
    "os::system.default": "is in namespace `os`, which the manifest does not declare",
}


@pytest.mark.parametrize(("op", "reason"), OPERATORS.items(), ids=OPERATORS)
@pytest.mark.parametrize("graph", ["forward", "joint"])
def test_operator_off_the_list_is_refused(crafted: Crafted, graph, op, reason):
    crafted.node(graph, op=op)
    assert crafted.refusal() == f"programs/train/{graph}.json: operator `{op}` {reason}"


@pytest.mark.parametrize(
    "op",
    [
        "relu",
        "aten:relu",
        "aten::relu.",
        "aten::re lu",
        "aten::relu(print(1))",
        "aten::a.b.c",
        "::relu",
        "",
        "__import__('os')",
    ],
)
def test_operator_with_a_malformed_name_is_refused(crafted: Crafted, op):
    crafted.node("forward", op=op)
    assert crafted.refusal() == f"{WHERE}: `Node.op` {op!r} is not a full operator name"


@pytest.mark.parametrize("op", ["python::eval", "python::exec", "python::getattr", "torch::load", "torch::compile"])
def test_builtin_that_is_unknown_is_refused(crafted: Crafted, op):
    crafted.node("forward", op=op)
    assert crafted.refusal() == f"{WHERE}: unknown builtin `{op}`"


def test_namespace_that_the_caller_did_not_allow_is_refused_at_load(crafted: Crafted):
    crafted.put("manifest", "requirements/operator_namespaces", ["inductor"])
    crafted.node("forward", op="inductor::_reinterpret_tensor.default")
    with pytest.raises(NotSupported) as caught:
        load(crafted.seal())
    assert str(caught.value) == (
        "the bundle calls custom operators of `inductor`, which the caller did not allow. Import the package that "
        "registers them first, and pass `operator_namespaces=['inductor']` to `load`"
    )


@pytest.mark.parametrize("op", ["inductor::nonsense.default", "inductor::__class__.__subclasses__"])
def test_custom_operator_that_is_no_operator_is_refused_at_load(crafted: Crafted, op):
    crafted.put("manifest", "requirements/operator_namespaces", ["inductor"])
    crafted.put("forward", f"schemas/{op}", f"{op.removesuffix('.default')}() -> Tensor")
    crafted.node("forward", op=op)
    with pytest.raises(NotSupported) as caught:
        load(crafted.seal(), target="autograd", operator_namespaces=["inductor"])
    assert str(caught.value) == (
        f"operator `{op}` is not registered: import the package that registers namespace `inductor` before loading"
    )


ZEROS = "aten::zeros.default"
CALLS = [
    # An integer in place of an enumeration is looked up unchecked by torch, and crashes the process.
    (ZEROS, [[2]], {"dtype": -1}, "argument `dtype` of operator `aten::zeros.default` is no ScalarType"),
    (ZEROS, [[2]], {"dtype": "calls"}, "argument `dtype` of operator `aten::zeros.default` is no ScalarType"),
    (ZEROS, [[2]], {"layout": 7}, "argument `layout` of operator `aten::zeros.default` is no Layout"),
    (ZEROS, [[2]], {"device": 0}, "argument `device` of operator `aten::zeros.default` is no Device"),
    (
        "aten::clone.default",
        ["linear"],
        {"memory_format": 99},
        "argument `memory_format` of operator `aten::clone.default` is no MemoryFormat",
    ),
    ("aten::view.dtype", ["linear", 100], {}, "argument `dtype` of operator `aten::view.dtype` is no ScalarType"),
    (
        "aten::softmax.int",
        ["linear", 0, 2**31 - 1],
        {},
        "argument `dtype` of operator `aten::softmax.int` is no ScalarType",
    ),
    ("aten::relu.default", [], {}, "operator `aten::relu.default` lacks its argument `self`"),
    ("aten::relu.default", ["linear", 1], {}, "operator `aten::relu.default` takes 1 positional arguments, got 2"),
    (
        "aten::relu.default",
        ["linear"],
        {"out": "linear"},
        "operator `aten::relu.default` takes no keyword argument 'out' here",
    ),
    (
        "aten::relu.default",
        ["linear"],
        {"self": 1},
        "operator `aten::relu.default` takes no keyword argument 'self' here",
    ),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "message"), CALLS, ids=[message[:60] for *_, message in CALLS])
def test_call_that_the_schema_does_not_have_is_refused_at_load(crafted: Crafted, op, args, kwargs, message):
    crafted.put("forward", "inputs/2/name", "calls")
    crafted.put("forward", "nodes/0/args/0", "calls")
    crafted.node("forward", op=op, args=args, kwargs=kwargs)
    with pytest.raises(BundleInvalid) as caught:
        load(crafted.seal(), target="autograd")
    assert str(caught.value) == f"programs/train/forward.json: {message}"


def test_operators_that_this_torch_lacks_are_all_refused_at_load(crafted: Crafted):
    captured = "aten::linear(Tensor input, Tensor weight, Tensor? bias=None, Tensor? more=None) -> Tensor"
    crafted.put("forward", "schemas/aten::linear.default", captured)
    crafted.put("joint", "schemas/aten::mm.default", "aten::mm(Tensor self, Tensor mat2, float a=1.0) -> Tensor")
    with pytest.raises(NotSupported) as caught:
        load(crafted.seal(), target="autograd")
    assert str(caught.value) == (
        f"operator `aten::linear.default` has another signature in torch {torch.__version__}.\n"
        f"  captured: {captured}\n"
        "  here:     aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor\n"
        "Run the bundle with the torch it was exported with, or export it again\n"
        f"operator `aten::mm.default` has another signature in torch {torch.__version__}.\n"
        "  captured: aten::mm(Tensor self, Tensor mat2, float a=1.0) -> Tensor\n"
        "  here:     aten::mm(Tensor self, Tensor mat2) -> Tensor\n"
        "Run the bundle with the torch it was exported with, or export it again"
    )


@pytest.mark.parametrize("schema", ["", "aten::relu(Tensor self)", "aten::abs(Tensor self) -> Tensor", "relu"])
def test_operator_without_its_signature_is_refused(crafted: Crafted, schema):
    crafted.put("forward", "schemas/aten::relu.default", schema)
    crafted.node("forward", op="aten::relu.default", args=["linear"])
    assert crafted.refusal() == "programs/train/forward.json: no signature of operator `aten::relu.default`"


def test_constant_that_spells_code_stays_a_string(crafted: Crafted, tmp_path):
    code = f"'); open({str(tmp_path / 'pwned')!r}, 'w'); ('"
    crafted.node(
        "forward", op="aten::gelu.default", args=["linear"], kwargs={"approximate": {"kind": "string", "value": code}}
    )
    module = load(crafted.seal(), target="autograd")
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        module(torch.ones(3, 4))
    assert not (tmp_path / "pwned").exists()
