"""Custom operators: of other signatures at load, without their package, and called in ways unlike the capture."""

import contextlib
import importlib
import subprocess
import sys

import pytest
import torch

import aotexport
import aotexport_runtime
from aotexport_runtime import NotSupported
from tests.cases.operators import NAMESPACE, cubed

CAPTURED = "scaled(Tensor x, float factor=2.5, *, bool doubled=False) -> Tensor"


@contextlib.contextmanager
def registered(schema):
    """Have the operator with a signature, for a while."""

    def scaled(x, *args, doubled=False, **others):
        return x * (args[0] if args else 2.5) * (2 if doubled else 1)

    with torch.library._scoped_library("aotexport_drift", "DEF") as library:
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, scaled, "CompositeExplicitAutograd")
        torch.library.register_fake(f"aotexport_drift::{name}", scaled, lib=library)
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Return a bundle that calls the operator by its default and with arguments."""

    def model(x):
        ops = torch.ops.aotexport_drift
        return ops.scaled(x) + ops.scaled(x, 3.0, doubled=True)

    path = tmp_path_factory.mktemp("operators") / "bundle"
    with registered(CAPTURED):
        aotexport.export(model, (torch.ones(3),), output=path, verify=False, keep_operators="aotexport_drift")
    return path


@pytest.mark.parametrize(
    "schema",
    [
        CAPTURED,
        "scaled(Tensor x, float factor=2.5, int power=1, *, bool doubled=False) -> Tensor",
        'scaled(Tensor x, float factor=2.5, *, bool doubled=False, str mode="plain") -> Tensor',
    ],
    ids=["same", "positional", "keyword"],
)
def test_operator_with_further_defaulted_arguments_is_accepted(bundle, schema):
    with registered(schema):
        for target in ("portable", "autograd"):
            module = aotexport_runtime.load(bundle, target=target, operator_namespaces=["aotexport_drift"])
            assert torch.equal(module(torch.ones(3)), torch.full((3,), 8.5))


@pytest.mark.parametrize(
    "schema",
    [
        "scaled(Tensor x, float factor=2.5) -> Tensor",
        "scaled(Tensor x, float scale=2.5, *, bool doubled=False) -> Tensor",
        "scaled(Tensor x, float factor=3.5, *, bool doubled=False) -> Tensor",
        "scaled(Tensor x, int power, float factor=2.5, *, bool doubled=False) -> Tensor",
        "scaled(Tensor x, float factor=2.5, *, bool doubled=False, int power) -> Tensor",
        "scaled(Tensor(a!) x, float factor=2.5, *, bool doubled=False) -> Tensor",
        "scaled(Tensor x, float factor=2.5, *, bool doubled=False) -> Tensor[]",
    ],
    ids=["removed", "renamed", "default", "inserted", "required", "mutating", "returns"],
)
def test_operator_with_another_signature_is_refused(bundle, schema):
    with registered(schema), pytest.raises(NotSupported) as caught:
        aotexport_runtime.load(bundle, operator_namespaces=["aotexport_drift"])(torch.ones(3))
    assert str(caught.value) == (
        f"operator `aotexport_drift::scaled.default` has another signature in torch {torch.__version__}.\n"
        f"  captured: aotexport_drift::{CAPTURED}\n  here:     aotexport_drift::{schema}\n"
        "Run the bundle with the torch it was exported with, or export it again"
    )


def test_operator_of_another_name_is_refused_as_missing(bundle):
    with registered("rescaled(Tensor x) -> Tensor"), pytest.raises(NotSupported) as caught:
        aotexport_runtime.load(bundle, operator_namespaces=["aotexport_drift"])(torch.ones(3))
    assert str(caught.value) == (
        "operator `aotexport_drift::scaled.default` is not registered: import the package that registers namespace "
        "`aotexport_drift` before loading"
    )


@pytest.fixture(scope="module")
def cubing(new_bundle):
    """Return a bundle that calls an operator with gradients and a rule for `vmap`."""
    x = torch.ones(3, requires_grad=True)
    return new_bundle(lambda x: cubed(x).sin(), x, keep_operators=[NAMESPACE])


def test_operators_whose_package_is_missing_are_refused_with_its_name(cubing):
    program = f"import aotexport_runtime; aotexport_runtime.load({str(cubing)!r})"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.stderr.splitlines()[-1] == (
        f"aotexport_runtime.errors.NotSupported: the bundle calls custom operators of `{NAMESPACE}`, which the caller "
        "did not allow. Write `import tests.cases.operators` first, and pass "
        f"`operator_namespaces=['{NAMESPACE}']` to `load`"
    )


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_operator_differentiated_twice_and_under_vmap_equals_eager(cubing, target):
    module = aotexport_runtime.load(cubing, target=target, operator_namespaces=[NAMESPACE])
    found = []
    for function in (module, lambda x: cubed(x).sin()):
        x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), x), torch.vmap(function)(torch.ones(2, 3) * 0.3)))
    torch.testing.assert_close(*found)


def test_operator_for_triton_names_its_module():
    @torch.library.triton_op("aotexport_drift::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    from aotexport.torch_internals.names import custom_operator_module

    assert custom_operator_module("aotexport_drift::tripled.default") == __name__


def test_operators_of_a_compiled_library_name_the_package_that_holds_it(tmp_path, monkeypatch):
    from aotexport.torch_internals.names import custom_operator_module

    package = tmp_path / "aotexport_native"
    package.mkdir()
    (package / "library.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", package / "library.so", package / "library.c"], check=True)
    (package / "__init__.py").write_text("import torch\n\ntorch.ops.load_library(__path__[0] + '/library.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert custom_operator_module("aotexport_native::halve.default") is None
    importlib.import_module("aotexport_native")
    assert custom_operator_module("aotexport_native::halve.default") == "aotexport_native"
    assert custom_operator_module("aotexport_other::halve.default") is None
