"""The bundle of a callable, unverified unless a test says otherwise."""

import pytest

import aotexport
import aotexport_runtime


@pytest.fixture
def load(tmp_path):
    """Return a function that exports a callable, by default unverified, and loads the bundle."""

    def export_and_load(function, *args, target="portable", **options):
        aotexport.export(function, args, output=tmp_path / "bundle", **{"verify": False, **options})
        return aotexport_runtime.load(tmp_path / "bundle", target=target)

    return export_and_load
