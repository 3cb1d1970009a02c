"""The crafted bundle of each test."""

import pytest

from tests.hostile.crafted import Crafted


@pytest.fixture
def crafted(tiny, tmp_path):
    return Crafted(tiny, tmp_path / "crafted")
