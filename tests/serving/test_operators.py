"""One server as operators run it: versions side by side, administration apart, streams, checks of health."""

from __future__ import annotations

import json
import queue
import re
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from aotexport_runtime.server.endpoints import metrics
from tests.serving.server import serving, wait_for
from tests.serving.test_swaps import ask, save_version
from tests.serving.test_swaps import metrics as metrics_of
from tests.unit.serving.test_servable import copied

TOKEN = {"Authorization": "Bearer only operators"}


@pytest.fixture(scope="module")
def operated(exported, tmp_path_factory):
    """Return the directory of a model with two versions, beside one that fails, and a server of it."""
    root = tmp_path_factory.mktemp("operated")
    model = root / "models/digits"
    shutil.copytree(exported("digits"), model / "1")
    save_version(exported("digits"), model / "2", 1)
    shutil.move(copied(exported("digits"), root), model / "3")
    (root / "token").write_text("only operators\n")
    options = ("--serve-versions", "all", "--admin-port", "0", "--admin-token-file", str(root / "token"))
    with serving(root / "models", *options) as server:
        yield model, server.wait_until_ready()


def admin(server, path, **more):
    port = server.lines("server listens")[0]["admin_port"]
    server.http, before = f"127.0.0.1:{port}", server.http
    try:
        return server.ask(path, {}, **more)[:2]
    finally:
        server.http = before


def test_versions_are_asked_by_number_and_canaries_by_weight(operated):
    model, server = operated
    index = [(entry["version"], entry["state"]) for entry in server.ask("/v2/repository/index", {})[1]]
    assert index == [("2", "READY"), ("1", "READY")]
    assert server.ask("/v2/models/digits")[1]["versions"] == ["2", "1"]
    with triton_http.InferenceServerClient(server.http) as client:
        assert {ask(client)[0] for _ in range(10)} == {"2"}, "the newest, until there are weights"
        for version, weight in {"1": 3, "2": 1, "3": 9}.items():
            (model / f"{version}.options.json").write_text(f'{{"weight": {weight}}}')
        wait_for(lambda: ask(client)[0] == "1", server)
        seen = [ask(client) for _ in range(200)]
        counts = {version: sum(each == version for each, _ in seen) for version, _ in seen}
        assert counts.keys() == {"1", "2"}
        assert 110 < counts["1"] < 190
        own = dict(seen)
        np.testing.assert_allclose(own["2"], own["1"] + 1, rtol=1e-5)
        for version in ("1", "2"):
            answer = client.infer("digits", [filled()], model_version=version)
            assert answer.get_response()["model_version"] == version
        with pytest.raises(InferenceServerException, match="no version `3` that is served; 2, 1 are"):
            client.infer("digits", [filled()], model_version="3")
    lines = [line for line in metrics_of(server) if line.startswith("aotexport_requests_total")]
    assert any('outcome="ok"' in line and 'version="1"' in line for line in lines)
    assert any(
        line.startswith('aotexport_request_seconds_count{model="digits",version="2"}') for line in metrics_of(server)
    )


def filled(kind=triton_http, rows=1, value=0.0):
    tensor = kind.InferInput("input", [rows, 8], "FP32")
    tensor.set_data_from_numpy(np.full((rows, 8), value, np.float32))
    return tensor


def test_administration_is_at_its_own_port_and_needs_the_token(operated):
    _, server = operated
    change = "/v2/repository/models/digits/load"
    error = {"error": "models are loaded and unloaded at the port of `--admin-port`"}
    assert server.ask(change, {}, headers=TOKEN)[:2] == (403, error)
    with (
        triton_grpc.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match=error["error"]),
    ):
        client.unload_model("digits", headers={"authorization": TOKEN["Authorization"]})
    for headers in ({}, {"Authorization": "Bearer guess"}):
        assert admin(server, change, headers=headers) == (
            401,
            {"error": "loading and unloading needs the token of `--admin-token-file`"},
        )
    status, answer = admin(server, change, headers=TOKEN)
    assert (status, answer["error"][:36]) == (400, "model `digits` is not loaded: versio")
    assert admin(server, "/v2/repository/index")[1][0]["name"] == "digits"
    assert admin(server, "/v2/models/digits/infer")[0] == 404


def test_stream_of_requests_is_answered_in_order_and_one_that_fails_ends_none(operated):
    _, server = operated
    answers = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(20):
            model = "ghost" if number == 7 else "digits"
            tensor = filled(triton_grpc, 1 + number % 3, number)
            client.async_stream_infer(model, [tensor], request_id=str(number), model_version="1")
        found = [answers.get(timeout=60) for _ in range(20)]
        client.stop_stream()
        assert str(found[7][1]) == "there is no model `ghost`"
        for number, (result, error) in enumerate(found):
            if number != 7:
                assert (error, result.get_response().id) == (None, str(number))
                alone = client.infer("digits", [filled(triton_grpc, 1, number)], model_version="1")
                expected = np.repeat(alone.as_numpy("output"), 1 + number % 3, axis=0)
                np.testing.assert_allclose(result.as_numpy("output"), expected, rtol=1e-5, atol=1e-5)


def test_health_and_index_are_told_by_grpc(operated):
    _, server = operated
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=60) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a\x05other", timeout=60)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert next(watch) == b"\x08\x01"
        watch.cancel()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        found = client.get_model_repository_index().models
        assert [(each.name, each.version, each.state) for each in found] == [
            ("digits", version, "READY") for version in ("2", "1")
        ]
        assert found[0].reason.startswith("version 3: the bundle disagrees with eager execution")


def test_service_is_described_by_grpc_where_its_package_is_installed(operated):
    database = pytest.importorskip(
        "grpc_reflection.v1alpha.proto_reflection_descriptor_database", reason="needs grpcio-reflection"
    )
    with grpc.insecure_channel(operated[1].grpc) as channel:
        found = database.ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in found.get_services()
        methods = found.FindFileContainingSymbol("inference.GRPCInferenceService").service[0].method
        assert "ModelInfer" in [method.name for method in methods]


def test_version_has_its_own_longest_time_and_priority(operated):
    model, server = operated
    own = {"max_latency_ms": 600_000, "request_timeout_s": 0.2, "priority": 7, "threads": 1}
    (model / "2.options.json").write_text(json.dumps(own))
    body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 8], "data": [0.0] * 8}]}
    path = "/v2/models/digits/versions/{}/infer"
    wait_for(lambda: server.ask(path.format(2), body)[:2] == (504, {"error": _LATE}), server)
    assert server.ask(path.format(1), body)[0] == 200
    stats = Path(f"/proc/{server.workers()[0]}/task").glob("*/stat")
    assert "7" in [stat.read_text().rpartition(")")[2].split()[16] for stat in stats]


_LATE = "the request was not answered within 200 ms"


def test_dashboard_and_alerts_ask_for_metrics_that_there_are():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which KServe brings")
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    known = [
        each
        for own in vars(metrics).values()
        if hasattr(own, "describe") and not isinstance(own, type)
        for each in own.describe()
    ]
    names = {each.name + suffix for each in known for suffix in suffixes[each.type]}
    folder = Path(__file__).parents[2] / "examples/serving/monitoring"
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    rules = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]
    service = yaml.safe_load((folder.parent / "kserve/digits.yaml").read_text())
    (scaling,) = service["spec"]["predictor"]["autoScaling"]["metrics"]
    asked.append(scaling["external"]["metric"]["query"])
    assert len(asked) > 13
    assert {name for expression in asked for name in re.findall(r"aotexport_\w+", expression)} <= names
