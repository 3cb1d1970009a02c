"""The models of a repository without a server: what is chosen, swapped, let go and refused."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from aotexport_runtime.schema.limits import Limits
from aotexport_runtime.server.bundles import find_models, options_beside
from aotexport_runtime.server.marks import Marks
from aotexport_runtime.server.options import ServeOptions, usable_cores
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.server.repository import Repository
from aotexport_runtime.server.supervisor import openmp_settings
from aotexport_runtime.serving.batcher import Waiting
from aotexport_runtime.serving.servable import Servable
from tests.refusals import refusal
from tests.unit.serving.test_servable import copied


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("200000 100000", 2), ("290000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == expected


@pytest.mark.parametrize(
    ("options", "given", "bound"),
    [
        ({"threads": 4}, {}, True),
        ({"threads": 4}, {"OMP_PROC_BIND": "false"}, False),
        ({"threads": 3}, {}, False),
        ({"threads": 4, "workers": 2}, {}, False),
        ({"threads": 4, "engine": "onnx"}, {}, False),
        ({"threads": 4, "device": "cuda"}, {}, False),
    ],
)
def test_threads_are_bound_where_one_worker_has_every_processor(tmp_path, options, given, bound):
    settings = openmp_settings(ServeOptions(repository=tmp_path, **options), 4, given)
    assert settings == {"GOMP_SPINCOUNT": "10000"} | ({"OMP_PROC_BIND": "true"} if bound else {})


def test_bundle_beyond_the_limits_is_not_served(root):
    repository = Repository(root, lambda path: Servable(path, limits=Limits(nodes=2)))
    repository.scan()
    assert served(repository) == {"digits": None, "words": "1"}
    assert "nodes" in repository.models["digits"].reason


@pytest.fixture
def root(exported, tmp_path):
    """Return a directory with two models."""
    shutil.copytree(exported("digits"), tmp_path / "models/digits/1")
    shutil.copytree(exported("words"), tmp_path / "models/words")
    return tmp_path / "models"


def served(repository):
    return {name: next(iter(model.served), None) for name, model in repository.models.items()}


def test_models_and_versions_are_found_the_newest_first(root):
    for name in ("2", "10", "010", "notes", ".3"):
        (root / "digits" / name).mkdir()
    found = find_models(root)
    assert [bundle.version for bundle in found["digits"]] == ["10", "2", "1"]
    assert [bundle.version for bundle in found["words"]] == ["1"]
    assert [*find_models(root / "words")] == ["words"]
    assert [each.version for each in find_models(root / "words", "named")["named"]] == ["1"]
    assert find_models(root, "named") == {}


def test_scan_serves_the_newest_version_that_passes(root, tmp_path, exported):
    shutil.move(copied(exported("digits"), tmp_path), root / "digits/2")
    events = []
    repository = Repository(root, Servable, watcher=lambda *event: events.append(event))
    repository.scan()
    assert served(repository) == {"digits": "1", "words": "1"}
    assert events == [("digits", "2", "failed"), ("digits", "1", "loaded"), ("words", "1", "loaded")]
    assert repository.models["digits"].reason.startswith("version 2: the bundle disagrees with eager execution: infer/")
    assert repository.unready == ""
    repository.scan()
    assert len(events) == 3


def test_new_version_is_loaded_when_it_has_not_changed_between_two_looks(root, exported):
    repository = Repository(root, Servable)
    repository.scan()
    old = repository.current("digits")
    shutil.copytree(exported("digits"), root / "digits/2")
    repository.scan()
    assert repository.current("digits") is old
    released = threading.Event()
    running = old.servable.batcher.submit(Waiting(function=released.wait))
    repository.scan()
    assert repository.current("digits").version == "2"
    assert repository.running_since is not None, "what the old version has begun runs on, and nobody waits for it"
    repository.unload("words")
    released.set()
    assert running.result()
    repository.close()
    with pytest.raises(Exception, match="is closed"):
        old.servable.infer({"input": np.zeros((1, 8), np.float32)})


def test_model_is_loaded_within_the_limit_once_the_old_version_of_another_has_answered(root, exported):
    repository = Repository(root, Servable, most_nbytes=1 << 30)
    repository.scan()
    repository.unload("words")
    released, old = threading.Event(), repository.current("digits")
    old.servable.batcher.submit(Waiting(function=released.wait))
    shutil.copytree(exported("digits"), root / "digits/2")
    repository.load("digits")
    loading = threading.Thread(target=repository.load, args=("words",))
    loading.start()
    loading.join(1)
    assert loading.is_alive()
    released.set()
    loading.join()
    assert served(repository) == {"digits": "2", "words": "1"}


def test_repository_is_unready_while_a_model_fails_that_was_there_at_first(root, tmp_path, exported):
    shutil.move(copied(exported("digits"), tmp_path), root / "broken")
    repository, serving = Repository(root, Servable), Repository(root, Servable, strict=False)
    looked_at = " or ".join(f"`{root}/{place}bundle.json`" for place in ("", "MODEL/", "MODEL/VERSION/"))
    assert serving.unready == f"no bundle is at {looked_at}"
    serving.find()
    assert serving.unready.startswith("model `broken` is not served: it is being loaded; model `digits` is not served:")
    serving.scan()
    assert serving.unready == ""
    repository.scan()
    assert repository.unready.startswith("model `broken` is not served: version 1: the bundle disagrees with eager")
    with pytest.raises(Refusal, match=r"^model `broken` cannot be served: version 1: the bundle disagrees with eager"):
        repository.current("broken")
    shutil.rmtree(root / "broken")
    repository.scan()
    assert repository.unready == ""


def test_repository_that_is_gone_keeps_what_is_served(root, caplog):
    repository = Repository(root, Servable)
    repository.scan()
    root.rename(root.with_name("away"))
    for _ in range(2):
        repository.scan()
    assert served(repository) == {"digits": "1", "words": "1"}
    assert (repository.unready, repository.is_empty) == ("", True)
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (line.message, line.fields["kept"]) == ("repository holds no bundle", ["digits", "words"])
    root.with_name("away").rename(root)
    shutil.rmtree(root / "words")
    repository.scan()
    assert (served(repository), repository.is_empty) == ({"digits": "1"}, False)


def test_model_that_was_asked_for_longest_ago_gives_room(root):
    room = max(bundle.nbytes for bundles in find_models(root).values() for bundle in bundles)
    repository = Repository(root, Servable, most_nbytes=room)
    repository.scan()
    assert served(repository) == {"digits": None, "words": "1"}
    assert repository.unready == ""
    assert repository.current("digits") is None
    repository.demand("digits")
    assert served(repository) == {"digits": "1", "words": None}
    repository.scan()
    assert served(repository) == {"digits": "1", "words": None}


def test_what_one_worker_is_told_the_others_do(root, tmp_path):
    (tmp_path / "marks").mkdir()
    workers = [(Repository(root, Servable), Marks(tmp_path / "marks")) for _ in range(2)]
    for repository, _ in workers:
        repository.scan()
    (first, marks), (second, others) = workers
    first.unload("words")
    marks.set("words", unloaded=True)
    others.follow(second)
    assert refusal(Refusal, second.current, "words") == "model `words` is unloaded; load it first"
    second.scan()
    assert served(second) == {"digits": "1", "words": None}
    first.load("words")
    marks.set("words", unloaded=False)
    others.follow(second)
    assert served(second) == {"digits": "1", "words": "1"}


def test_unknown_names_are_refused(root):
    repository = Repository(root, Servable)
    repository.scan()
    for ask in (repository.current, repository.load, repository.unload, repository.demand):
        assert refusal(Refusal, ask, "none") == "there is no model `none`"
    said = refusal(Refusal, repository.current, "digits", "2")
    assert said == "model `digits` has no version `2` that is served; 1 is"


def test_versions_are_served_side_by_side_and_share_calls_by_weight(root, exported, tmp_path, caplog):
    for version in ("2", "4"):
        shutil.copytree(exported("digits"), root / "digits" / version)
    shutil.move(copied(exported("digits"), tmp_path), root / "digits/3")
    made = []
    repository = Repository(root, lambda path: made.append(path.name) or Servable(path), versions="1,2,3")
    repository.scan()
    model = repository.models["digits"]
    assert served(repository)["digits"] == "2"
    assert [*model.served] == ["2", "1"]
    assert model.reason.startswith("version 3: the bundle disagrees with eager")
    assert {repository.current("digits").version for _ in range(20)} == {"2"}
    assert repository.current("digits", "1").version == "1"
    with pytest.raises(Refusal, match="model `digits` has no version `3` that is served; 2, 1 are"):
        repository.current("digits", "3")
    for version, weight in {"1": 3, "2": 1, "3": 50}.items():
        (root / f"digits/{version}.options.json").write_text(f'{{"weight": {weight}}}')
    repository.scan()
    found = [repository.current("digits").version for _ in range(400)]
    assert set(found) == {"1", "2"}
    assert 230 < found.count("1") < 370
    shutil.rmtree(root / "digits/2")
    repository.scan()
    assert [*model.served] == ["1"]
    assert made == ["3", "2", "1", "words"], "a weight changes without another load"
    repository.close()


def test_options_beside_a_version_are_its_own_and_loaded_anew_when_they_change(root):
    repository = Repository(root, lambda path: Servable(path, **options_beside(path)))
    file = root / "digits/1.options.json"
    file.write_text('{"max_batch_size": 3}')
    repository.scan()
    assert repository.current("digits").servable.batcher.max_batch_size == 3
    assert repository.current("words").servable.batcher.max_batch_size == 32
    file.write_text('{"max_batch_size": 5}')
    repository.scan()
    repository.scan()
    assert repository.current("digits").servable.batcher.max_batch_size == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "`1.options.json` holds no options: Input data was truncated"),
        (
            '{"trust": "native"}',
            "`1.options.json`: there is no option `trust`; there are engine, threads, priority, max_batch_size, pad, "
            "max_latency_ms, max_waiting, max_tokens, weight, request_timeout_s",
        ),
        ('{"weight": -1}', "`1.options.json`: `weight` is a number from 0 on, got -1"),
        ('{"request_timeout_s": 0}', "`1.options.json`: `request_timeout_s` is a number from 0.001 on, got 0"),
        ('{"priority": 1.5}', "`priority`: expected an integer, got float"),
        ('{"max_batch_size": "8"}', "`max_batch_size`: expected an integer, got str"),
    ],
)
def test_wrong_options_beside_a_version_are_the_reason_why_it_is_not_served(root, text, message):
    (root / "digits/1.options.json").write_text(text)
    repository = Repository(root, lambda path: Servable(path, **options_beside(path)))
    repository.scan()
    assert repository.models["digits"].reason == f"version 1: {message}"


def test_first_look_beside_directories_that_are_renamed_finds_the_others(root, monkeypatch):
    def renamed_meanwhile(path, scan=os.scandir):
        if Path(path).name == "new":
            Path(path).rename(root / "digits/3")
        return scan(path)

    (root / "digits/new").mkdir()
    repository = Repository(root, Servable)
    monkeypatch.setattr(os, "scandir", renamed_meanwhile)
    assert repository.find().keys() == {"digits", "words"}
