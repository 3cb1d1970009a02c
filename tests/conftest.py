"""Fixtures shared by several kinds of tests: one small bundle, exported once, and where bundles are verified."""

import contextlib
import copy
import functools
import gc
import importlib
import logging
import platform
import re
import subprocess
import types

import numpy
import pytest
import torch
from _pytest.junitxml import xml_key
from packaging.requirements import Requirement

import aotexport
import aotexport_runtime
from aotexport.process import patches
from aotexport.process.patches import ALWAYS
from aotexport.verify.fresh import FreshProcess
from tests import forked
from tests.models import Tiny

VERSIONS = {"torch": torch.__version__, "python": platform.python_version(), "numpy": numpy.__version__}


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Write the versions to files of results, for `tests/golden/matrix.py`; import the tests."""
    gc.disable()
    xml = config.stash.get(xml_key, None)
    if xml is not None:
        for package, version in VERSIONS.items():
            xml.add_global_property(package, version)


PLACES = tuple(f"aotexport.{module}.FreshProcess" for module in ("pipeline.export", "verify.bundles", "cli.output"))


@pytest.fixture(scope="session", autouse=True)
def forked_processes():
    """Exports of this process are verified, and kernels interpreted, in forks of one fresh process."""
    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            patch.setattr(place, forked.ForkedProcess)
        patch.setattr("aotexport.verify.interpret.subprocess", types.SimpleNamespace(run=forked.interpret))
        yield
    forked.end()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk():
    """Exports of this process do not wait until their files are on the disk; `tests/writers` tests that users' do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotexport_runtime.bundle.staging._sync_entries", lambda path: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def wrappers_compiled_in_short():
    """The C++ around the kernels of libraries is compiled without optimisation, which takes a third of the time."""
    config = importlib.import_module("torch._inductor.config")
    with pytest.MonkeyPatch.context() as patch, config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        patch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
        yield


@pytest.fixture(scope="session", autouse=True)
def translations_read_once():
    """For each ONNX model torch reads its 500 translations from their sources, which takes two thirds of the time."""
    original = torch.onnx.export

    def export(*args, **options):
        registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        read = functools.cache(registry.from_torchlib)

        def from_torchlib(*args, **options):
            made = copy.copy(read(*args, **options))
            made.functions = {operator: [*functions] for operator, functions in made.functions.items()}
            return made

        patch.setattr(torch.onnx, "export", original)
        patch.setattr(registry, "from_torchlib", staticmethod(from_torchlib))
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_process_compiles_kernels():
    """A second one would take a core from the other tests, and its start takes longer than most kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotexport.lower.cuda.compile.MAX_WORKERS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_records_of_torchs_tracing():
    """Pytest adds its handlers to every logger, and torch makes records of each step for one: a tenth of an export."""
    traces = logging.getLogger("torch.__trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "addHandler", lambda handler: None)
        traces.handlers.clear()
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """What the imports have made is left out of Python's searches for garbage, which are fewer: they take a tenth.

    Exports leave it as it is: to see that something is frozen they would count all of it, 30 ms each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aotexport.pipeline.export.searched_for_new_garbage", contextlib.nullcontext)
        yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_leftovers(frozen_imports):
    """So is what earlier files have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def explained_patches():
    """Every patch that the tests of this process bring about says why it is there, and is not due to go."""
    yield
    for patch in patches.seen.values():
        assert re.match(r"[A-Z][a-z]+ .*[^.]$", patch.reason) or patch.reason == "Try", patch.target
        due = patch.remove_when != ALWAYS and Requirement(patch.remove_when).specifier.contains(torch.__version__)
        assert not due, f"see whether the patch of {patch.target} can go: {patch.reason}"


@pytest.fixture
def fresh_processes(monkeypatch):
    """Exports of this test are verified in processes of their own, as users' are."""
    for place in PLACES:
        monkeypatch.setattr(place, FreshProcess)
    monkeypatch.setattr("aotexport.verify.interpret.subprocess", subprocess)


@pytest.fixture(scope="module")
def new_bundle(tmp_path_factory):
    """Return what exports a callable with its arguments, unverified unless a test says so, and gives the directory."""

    def exported(function, *args, **options):
        path = tmp_path_factory.mktemp("bundles") / "bundle"
        aotexport.export(function, args, output=path, **{"verify": False, **options})
        return path

    return exported


@pytest.fixture(scope="module")
def bundle_of(new_bundle):
    """Return the same, which exports each callable with its arguments once for the tests of a file."""
    return functools.cache(new_bundle)


@pytest.fixture
def load(tmp_path):
    """Return what exports a callable to `tmp_path / "bundle"`, unverified unless a test says so, and loads it."""

    def exported_and_loaded(function, *args, target="portable", **options):
        aotexport.export(function, args, output=tmp_path / "bundle", **{"verify": False, **options})
        return aotexport_runtime.load(tmp_path / "bundle", target=target)

    return exported_and_loaded


@pytest.fixture(scope="session")
def make_tiny():
    """Return a function that makes the small module anew, always with the same weights."""

    def make():
        torch.manual_seed(0)
        return Tiny()

    return make


@pytest.fixture(scope="session")
def tiny(make_tiny, tmp_path_factory):
    """Return the directory of a small bundle; not to be written to."""
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    batch = torch.export.Dim("batch", min=2, max=64)
    aotexport.export(
        make_tiny(), (torch.linspace(-1, 1, 20).reshape(5, 4),), output=path, dynamic_shapes=({0: batch},), verify=False
    )
    return path
