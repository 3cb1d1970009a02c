"""Versions that come, go and fail while clients ask."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import tritonclient.http as triton_http

import aotexport_runtime
from tests.serving.server import serving, wait_for
from tests.unit.serving.test_servable import copied


def save_version(bundle, place, bias):
    """Write a tuned version of the bundle `digits`: its answers are `bias` more."""
    module = aotexport_runtime.load(bundle)
    with torch.no_grad():
        dict(module.named_parameters())["2.bias"].add_(bias)
    aotexport_runtime.save(module, place)


def ask(client, rows=1):
    tensor = triton_http.InferInput("input", [rows, 8], "FP32")
    tensor.set_data_from_numpy(np.zeros((rows, 8), np.float32))
    answer = client.infer("digits", [tensor])
    return answer.get_response()["model_version"], answer.as_numpy("output")


def index(server):
    return {entry["name"]: entry for entry in server.ask("/v2/repository/index", {})[1]}


@pytest.fixture
def changing(exported, tmp_path):
    """Return a repository of one model, and a server of it."""
    shutil.copytree(exported("digits"), tmp_path / "models/digits/1")
    with serving(tmp_path / "models", "--access-log", "off") as server:
        yield tmp_path / "models/digits", server.wait_until_ready()


def test_versions_are_swapped_under_load_and_every_answer_is_of_the_version_it_names(changing, exported):
    model, server = changing
    with triton_http.InferenceServerClient(server.http) as client:
        _, first = ask(client)
    ended, answers = threading.Event(), [0] * 8

    def load(number):
        with triton_http.InferenceServerClient(server.http) as client:
            while not ended.is_set():
                rows = 1 + number % 3
                version, values = ask(client, rows)
                expected = np.repeat(first, rows, axis=0) + int(version) - 1
                np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
                answers[number] += 1

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, number) for number in range(8)]
        try:
            for version in range(2, 7):
                save_version(exported("digits"), model / str(version), version - 1)
                server.wait_for_log("model is served", version=str(version))
                before = [*answers]
                wait_for(lambda before=before: all(a > b for a, b in zip(answers, before, strict=True)), server)
        finally:
            ended.set()
        for each in loads:
            each.result()
    assert index(server)["digits"] == {"name": "digits", "version": "6", "state": "READY", "reason": ""}


def test_bad_version_leaves_the_old_one_serving_and_says_why(changing, exported, tmp_path):
    model, server = changing
    shutil.move(copied(exported("digits"), tmp_path), model / "2")
    line = server.wait_for_log("model is not loaded", version="2")
    assert line["reason"].startswith("the bundle disagrees with eager execution: infer/example ")
    entry = index(server)["digits"]
    assert (entry["version"], entry["state"]) == ("1", "READY")
    assert entry["reason"] == f"version 2: {line['reason']}"
    assert 'aotexport_model_events_total{event="failed",model="digits",version="2"} 1.0' in metrics(server)
    with triton_http.InferenceServerClient(server.http) as client:
        assert ask(client)[0] == "1"
        assert client.is_server_ready()


def metrics(server):
    return server.ask("/metrics")[1].decode().splitlines()


def test_version_that_is_taken_back_gives_way_to_the_one_before(changing, exported):
    model, server = changing
    save_version(exported("digits"), model / "2", 1)
    server.wait_for_log("model is served", version="2")
    shutil.rmtree(model / "2")
    server.wait_for_log("model is served", version="1", times=2)
    with triton_http.InferenceServerClient(server.http) as client:
        assert ask(client)[0] == "1"


def test_bundle_is_served_by_its_name_and_swapped_where_it_is(exported, tmp_path):
    shutil.copytree(exported("digits"), tmp_path / "digits")
    with serving(tmp_path / "digits") as server, triton_http.InferenceServerClient(server.http) as client:
        server.wait_until_ready()
        _, first = ask(client)
        module = aotexport_runtime.load(tmp_path / "digits")
        with torch.no_grad():
            dict(module.named_parameters())["2.bias"].add_(1)
        aotexport_runtime.save(module, tmp_path / "digits", force=True)
        server.wait_for_log("model is served", times=2)
        np.testing.assert_allclose(ask(client)[1], first + 1, rtol=1e-6)


def test_server_is_not_ready_while_a_model_has_never_passed(exported, tmp_path):
    shutil.copytree(exported("digits"), tmp_path / "models/digits")
    copied(exported("digits"), tmp_path / "models")
    with serving(tmp_path / "models") as server:
        server.wait_for_log("model is not loaded", model="bundle")
        server.wait_for_log("model is served", model="digits")
        assert server.ask("/v2/health/live")[:2] == (200, {"live": True})
        status, found, _ = server.ask("/v2/health/ready")
        assert status == 503
        assert found["error"].startswith("model `bundle` is not served: version 1: the bundle disagrees with eager")
        status, found, _ = server.ask("/v2/models/bundle/infer", {"inputs": []})
        assert status == 503
        assert found["error"].startswith("model `bundle` cannot be served: version 1: the bundle disagrees with eager")
        shutil.rmtree(tmp_path / "models/bundle")
        server.wait_until_ready()


def test_model_that_was_used_longest_ago_gives_room_and_comes_back_when_it_is_asked_for(repository):
    names = ("digits", "kinds", "pair", "words")
    sizes = {
        name: sum(file.stat().st_size for file in (repository / name).rglob("*") if file.is_file()) for name in names
    }
    room = sum(sizes.values()) - 1
    with serving(repository, "--memory-limit", str(room)) as server:
        server.wait_until_ready()
        assert {name: entry["state"] for name, entry in index(server).items()} == dict.fromkeys(names, "READY")
        assert len(server.lines("model is served")) == 4
        with triton_http.InferenceServerClient(server.http) as client:
            ask(client)
        assert server.ask("/v2/models/digits")[0] == 200
        server.wait_for_log("model is served", model="digits", times=2)
