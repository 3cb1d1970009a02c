"""One server of small models for most tests; they need KServe, which `make test-serve` installs."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tests.serving.server import serving
from tests.unit.serving.conftest import exported  # noqa: F401 (a fixture)


class Skipped(pytest.Module):
    def collect(self):
        pytest.skip("KServe's SDK is not installed here; `make test-serve` installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip the modules, which import clients, where they are not installed."""
    missing = any(importlib.util.find_spec(name) is None for name in ("kserve", "tritonclient"))
    return Skipped.from_parent(parent, path=module_path) if missing else None


@pytest.fixture(scope="session")
def repository(exported, tmp_path_factory):  # noqa: F811
    """Return a directory of models; not to be changed."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("digits", "kinds", "pair", "words"):
        shutil.copytree(exported(name), root / name / "1")
    return root


@pytest.fixture(scope="session")
def server(repository):
    """Return a ready server of `repository`."""
    with serving(repository, "--max-request-bytes", "100000") as server:
        yield server.wait_until_ready()
