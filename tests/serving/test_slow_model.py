"""A model that takes long for each row: requests are joined no further than half of their time allows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.export import Dim

import aotexport
from tests.serving.server import serving

CLIENTS = 12


class Slow(torch.nn.Module):
    """Takes about half a second for each row."""

    def forward(self, x):
        x = x * torch.linspace(0, 1, 1_000_000)
        for _ in range(30):
            x = (x * 1.1).sin()
        return x.sum(dim=1)


def test_requests_are_joined_as_far_as_their_time_allows_and_no_worker_is_ended(tmp_path):
    batch = ({0: Dim("batch", min=1, max=64)},)
    output = tmp_path / "models/slow"
    aotexport.export(
        Slow(), (torch.ones(2, 1),), output=output, dynamic_shapes=batch, programs=("infer",), verify=False
    )
    with serving(output.parent, "--request-timeout-s", "4", "--threads", "1") as server:
        server.wait_until_ready()
        assert server.lines("model is served", joined_along="batch")
        body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(server.ask, "/v2/models/slow/infer", body) for _ in range(CLIENTS)]
            statuses = [each.result()[0] for each in asked]
        assert set(statuses) <= {200, 504}
        assert 200 in statuses
        assert max(line["batch"] for line in server.lines("request", outcome="ok")) < CLIENTS
        assert not server.lines("worker has ended")
