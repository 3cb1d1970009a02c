"""Every public name of both packages can be imported and says what it is."""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import aotexport
import aotexport_runtime
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.server.options import ServeOptions, sentences_of
from aotexport_runtime.serving.options import ServableOptions


def _modules() -> list[str]:
    packages = (aotexport, aotexport_runtime)
    found = [package.__name__ for package in packages]
    for package in packages:
        found += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found = [name for name in found if not name.endswith(".__main__")]
    if importlib.util.find_spec("kserve") is None:
        # `make test-serve` sees them.
        found = [name for name in found if not name.startswith("aotexport_runtime.server.endpoints.")]
    return found


def _undocumented(module: ModuleType) -> list[str]:
    missing = [] if module.__doc__ else ["the module"]
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if not isinstance(value, FunctionType | type):
            continue
        if not value.__doc__:
            missing.append(name)
        if isinstance(value, type):
            missing += [f"{name}.{member}" for member in _undocumented_members(value)]
    return missing


def _undocumented_members(class_: type) -> list[str]:
    fields = getattr(class_, "__dataclass_fields__", {})
    public = [(n, member) for n, member in vars(class_).items() if not n.startswith("_") and n not in fields]
    methods = [(n, m) for n, m in public if isinstance(m, FunctionType | property | classmethod | staticmethod)]
    return [name for name, _ in methods if not inspect.getdoc(getattr(class_, name))]


@pytest.mark.parametrize("name", _modules())
def test_every_public_name_of_a_module_is_documented(name):
    assert _undocumented(importlib.import_module(name)) == []


def test_help_of_load_names_every_option_and_its_page_no_others():
    page = Path("docs/runtime.md").read_text().partition("## Loading")[2].partition("\n\nLibraries")[0]
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    options = sorted(field.name for field in dataclasses.fields(LoadOptions))
    assert len(rows) > 5
    assert {*re.findall(r"\w+", " ".join(rows))} <= {*options}
    assert sorted(inspect.signature(aotexport_runtime.load).parameters) == sorted(["path", *options])
    assert sorted(re.findall(r"^    (\w+):", inspect.getdoc(LoadOptions), re.MULTILINE)) == options


@pytest.mark.parametrize("function", [aotexport_runtime.load, aotexport_runtime.Servable])
def test_unknown_option_is_refused_by_the_name_of_the_function(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}\b.* got an unexpected keyword argument 'devices'$"):
        function("bundle", devices="cpu")


def test_help_of_a_servable_and_of_the_server_names_every_option():
    own = {field.name for field in dataclasses.fields(ServableOptions)}
    assert sentences_of(ServableOptions).keys() == own
    assert inspect.signature(aotexport_runtime.Servable).parameters.keys() == own | {"path"}
    options = {field.name for field in dataclasses.fields(ServeOptions)}
    assert own | sentences_of(ServeOptions).keys() == options


@pytest.mark.parametrize("package", [aotexport, aotexport_runtime], ids=lambda package: package.__name__)
def test_every_name_that_a_package_offers_can_be_imported_and_is_documented(package):
    assert sorted(package.__all__) == package.__all__
    assert [name for name in package.__all__ if not getattr(package, name).__doc__] == []


@pytest.mark.parametrize("package", [aotexport, aotexport_runtime], ids=lambda package: package.__name__)
def test_reference_has_every_public_name(package: ModuleType) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto\w+:: \w+\.(\w+)$", page, re.MULTILINE)
    assert [name for name in package.__all__ if name not in shown] == []
