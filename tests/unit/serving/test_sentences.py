"""Joined calls of a pretrained transformer."""

import sys

import pytest
import torch

from aotexport_runtime.serving.servable import Servable
from tests.e2e.processes import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_joined_sentences_have_the_embeddings_that_they_have_alone(tmp_path):
    run(sys.executable, "-m", "aotexport", EXAMPLES / "minilm/model.py", "-o", "bundle", "--fast", cwd=tmp_path)
    servable = Servable(tmp_path / "bundle", max_batch_size=8, max_latency_ms=600_000, pad="sequence")
    servable.warm_up()
    assert (servable.batch_axes.name, servable.batch_axes.padded.name) == ("batch", "sequence")
    lengths = (12, 9, 16, 10)
    calls = [{"input_ids": torch.randint(999, 30522, (2, length))} for length in lengths]
    for call, length in zip(calls, lengths, strict=True):
        call["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [5]])).long()
    futures = [servable.submit(call) for call in calls]
    assert {future.result().keys() and future.batch_size for future in futures} == {8}
    for call, future in zip(calls, futures, strict=True):
        torch.testing.assert_close(future.result()["output"], servable.infer(call)["output"], rtol=0, atol=1e-5)
    servable.close()
