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


@pytest.mark.parametrize("part", ["server", "the rest"])
def test_every_public_method_is_documented(part):
    """Modules, classes and functions are the linter's."""
    found = []
    names = [name for name in _modules() if name.startswith("aotexport_runtime.server") == (part == "server")]
    for module in map(importlib.import_module, names):
        for class_ in vars(module).values():
            if (
                isinstance(class_, type)
                and class_.__module__ == module.__name__
                and not class_.__name__.startswith("_")
            ):
                fields = getattr(class_, "__dataclass_fields__", {})
                methods = [n for n, m in vars(class_).items() if isinstance(m, FunctionType | property | classmethod)]
                public = [name for name in methods if not name.startswith("_") and name not in fields]
                found += [f"{class_.__name__}.{name}" for name in public if not inspect.getdoc(getattr(class_, name))]
    assert found == []


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
