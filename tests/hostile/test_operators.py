"""Operators and classes that nobody gave, and constants that spell code."""

import pytest
import torch

from aotexport_runtime import NotSupported, load
from tests.hostile.crafted import Crafted
from tests.refusals import refusal


def test_namespace_that_the_caller_did_not_allow_is_refused_at_load(crafted: Crafted):
    crafted.put("manifest", "requirements/operator_namespaces", ["inductor"])
    crafted.node("forward", op="inductor::_reinterpret_tensor.default")
    assert refusal(NotSupported, load, crafted.seal()) == (
        "the bundle calls custom operators of `inductor`, which the caller did not allow. Import the package that "
        "registers them first, and pass `operator_namespaces=['inductor']` to `load`"
    )


@pytest.mark.parametrize("op", ["inductor::nonsense.default", "inductor::__class__.__subclasses__"])
def test_custom_operator_that_is_no_operator_is_refused_at_load(crafted: Crafted, op):
    crafted.put("manifest", "requirements/operator_namespaces", ["inductor"])
    crafted.put("forward", f"schemas/{op}", f"{op.removesuffix('.default')}() -> Tensor")
    crafted.node("forward", op=op)
    assert refusal(NotSupported, load, crafted.seal(), target="autograd", operator_namespaces=["inductor"]) == (
        f"operator `{op}` is not registered: import the package that registers namespace `inductor` before loading"
    )


def test_constant_that_spells_code_stays_a_string(crafted: Crafted, tmp_path):
    code = f"'); open({str(tmp_path / 'pwned')!r}, 'w'); ('"
    crafted.node(
        "forward", op="aten::gelu.default", args=["linear"], kwargs={"approximate": {"kind": "string", "value": code}}
    )
    module = load(crafted.seal(), target="autograd")
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        module(torch.ones(3, 4))
    assert not (tmp_path / "pwned").exists()


def test_submodule_of_a_class_that_is_not_known_is_one_of_the_models(crafted: Crafted):
    crafted.put("manifest", "modules", [{"name": ""}, {"name": "linear", "type": "os.system"}])
    assert type(load(crafted.seal()).linear).__name__ == "LoadedSubmodule"
