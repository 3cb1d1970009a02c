"""Fixtures of the end-to-end tests."""

import sys
from pathlib import Path

import pytest

from tests.e2e import installed
from tests.e2e.processes import EXAMPLES, ROOT, Example, run


@pytest.fixture(scope="session")
def runtime_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without the exporter."""
    directory = tmp_path_factory.mktemp("runtime") / "venv"
    # What builds the wheel is here: pip does not fetch it anew.
    run("env", "PIP_NO_BUILD_ISOLATION=0", sys.executable, EXAMPLES / "runtime_venv.py", directory, cwd=ROOT)
    return directory / "bin" / "python"


@pytest.fixture(scope="session")
def installed_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the README's install lines were run."""
    return installed.make(tmp_path_factory.mktemp("installed"), installed.install_lines("README.md"))


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, runtime_python: Path) -> Example:
    """The example whose name is the parameter."""
    return Example(request.param, tmp_path, runtime_python)
