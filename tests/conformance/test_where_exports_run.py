"""Exports from other places than the main thread of a script, and to other paths."""

import asyncio
import threading

import torch
from torch import nn

import aotexport
import aotexport_runtime


def exported(path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    aotexport.export(model, (x,), output=path, programs=["infer"])
    torch.testing.assert_close(aotexport_runtime.load(path)(x), model(x), rtol=0, atol=0)


def test_export_in_a_worker_thread_equals_eager(tmp_path):
    failures = []

    def work():
        try:
            exported(tmp_path / "bundle")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


def test_export_in_an_event_loop_as_notebooks_have_it_equals_eager(tmp_path):
    async def cell():
        exported(tmp_path / "bundle")

    asyncio.run(cell())
    assert (tmp_path / "bundle" / "bundle.json").exists()
