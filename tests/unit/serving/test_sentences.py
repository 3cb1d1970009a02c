"""Joined calls of a pretrained transformer."""

import sys

import pytest
import torch

from aotexport_runtime.serving.servable import Servable
from tests.e2e.processes import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_joined_sentences_have_the_embeddings_that_they_have_alone(tmp_path):
    run(sys.executable, "-m", "aotexport", EXAMPLES / "minilm/model.py", "-o", "bundle", "--fast", cwd=tmp_path)
    servable = Servable(tmp_path / "bundle", max_batch_size=8, max_latency_ms=600_000)
    servable.warm_up()
    assert servable.batch_axes.name == "batch"
    calls = [{name: torch.randint(999, 30522, (2, 12)) for name in ("input_ids",)} for _ in range(4)]
    for call in calls:
        call["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [5]])).long()
    futures = [servable.submit(call) for call in calls]
    for call, future in zip(calls, futures, strict=True):
        torch.testing.assert_close(future.result()["output"], servable.infer(call)["output"], rtol=0, atol=1e-5)
    servable.close()
