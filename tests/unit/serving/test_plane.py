"""Requests that a version's swap meets halfway. KServe is not where most tests run: `make test-serve` runs this one."""

import asyncio
import shutil

import numpy as np
import pytest

from aotexport_runtime.server.marks import Marks
from aotexport_runtime.server.messages import Request
from aotexport_runtime.server.options import ServeOptions
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.server.repository import Repository
from aotexport_runtime.serving.servable import Servable

pytest.importorskip("kserve", reason="KServe's SDK is not installed here; `make test-serve` installs it")


@pytest.mark.parametrize("version", ["", "1"])
def test_request_for_a_version_that_is_swapped_while_it_is_read_is_not_answered_by_another(exported, tmp_path, version):
    from aotexport_runtime.server.endpoints.plane import BundlePlane

    shutil.copytree(exported("digits"), tmp_path / "digits/1")
    repository = Repository(tmp_path, Servable)
    repository.scan()
    (tmp_path / "marks").mkdir()
    plane = BundlePlane(repository, ServeOptions(repository=tmp_path), Marks(tmp_path / "marks"))

    async def read(signature, hold):
        shutil.copytree(exported("digits"), tmp_path / "digits/2")
        repository.scan()
        repository.scan()
        return Request(id="", inputs={"input": np.ones((1, 8), np.float32)}, outputs={})

    def ask():
        return asyncio.run(plane.answer("http", "digits", version, read, lambda request, answered, _: answered.version))

    if version:
        with pytest.raises(Refusal, match="model `digits` has no version `1` that is served; 2 is"):
            ask()
    else:
        assert ask() == "2"
