"""`push` and `pull`: bundles in repositories, by huggingface_hub beside a server of the endpoints that it asks."""

import base64
import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

import aotexport_runtime
from aotexport.cli import app
from aotexport_runtime.cli.app import main
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, HubFailed, OutputExists

BUNDLE = Path(__file__).parents[1] / "golden" / "v1.1" / "tiny" / "bundle"
ADDRESS = "hf://me/tiny"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its commits by branch: files by path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}

    def files(self, name, revision):
        """Return the files at a branch or commit, and the commit; the newest is kept."""
        branches = self.repositories.get(name, {})
        branch = next((each for each in branches if revision in (each, self.commit(branches[each]))), None)
        return (branches[branch], self.commit(branches[branch])) if branch else (None, "")

    @staticmethod
    def commit(files):
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def listed(files):
    return [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files.items()]


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, code, content, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(data))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        path, length = urlsplit(self.path).path, int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if self.headers.get("authorization") is None:
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            made = name not in self.server.repositories
            self.server.repositories.setdefault(name, {"main": {}})
            return self.answer(200 if made else 409, {"url": f"https://huggingface.co/{name}"})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        name, action, revision = re.fullmatch(r"/api/models/([^/]+/[^/]+)/([\w-]+)/([^/]+)", path).groups()
        branches = self.server.repositories.get(name, {})
        if action == "paths-info":
            files, wanted = self.server.files(name, revision)[0], parse_qs(body.decode())["paths"]
            found = {each: files[each] for each in wanted if each in files} if files else {}
            return self.answer(200 if branches else 404, listed(found))
        if action == "branch":
            made = revision not in branches
            branches.setdefault(revision, dict(branches["main"]))
            return self.answer(200 if made else 409, {})
        if action == "preupload":
            modes = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": modes})
        files = dict(branches[revision])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        branches[revision] = files
        commit = self.server.commit(files)
        return self.answer(200, {"commitUrl": f"https://huggingface.co/{name}/commit/{commit}", "commitOid": commit})

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?", path)
        if found is None or found[1] not in self.server.repositories:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        files, commit = self.server.files(found[1], found[3])
        if files is None:
            return self.answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        if found[2] == "revision":
            return self.answer(200, {"id": found[1], "sha": commit})
        if found[2] == "tree":
            return self.answer(200, listed(files))
        data = files[found[4]]
        return self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
    huggingface_hub.close_session()


def files_of(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_bundle_comes_back_as_it_was_sent_with_a_card(hub, tmp_path):
    result = CliRunner().invoke(app, ["push", str(BUNDLE), ADDRESS, "--licence", "mit"])
    assert result.exit_code == 0, result.output
    hub.repositories["me/tiny"]["main"] |= {"pytorch_model.bin": b"pickle", "bundle/more.pkl": b"pickle"}
    assert main(["pull", ADDRESS, "-o", "tiny"]) == 0
    assert files_of(tmp_path / "tiny") == files_of(BUNDLE)
    card = huggingface_hub.ModelCard(hub.repositories["me/tiny"]["main"]["README.md"].decode())
    assert card.data.to_dict() == {"library_name": "aotexport", "license": "mit", "tags": ["aotexport", "pytorch"]}
    for shown in ("pull hf://me/tiny -o bundle", "program train", "x: float32[batch, 4]", "dtypes: float32 ("):
        assert shown in card.text


def test_a_further_push_replaces_the_bundle_and_keeps_what_is_beside_it(hub, tmp_path):
    aotexport_runtime.push(BUNDLE, ADDRESS, licence="mit")
    files = hub.repositories["me/tiny"]["main"]
    files |= {"bundle/weights/old.safetensors": b"old", "notes.txt": b"mine"}
    files["README.md"] = (
        files["README.md"].replace(b"# Tiny", b"# Mine").replace(b"float32", b"float64") + b"\nMy words.\n"
    )
    aotexport_runtime.push(BUNDLE, ADDRESS)
    files = hub.repositories["me/tiny"]["main"]
    assert {*files} == {"README.md", "notes.txt", *(f"bundle/{name}" for name in files_of(BUNDLE))}
    card = files["README.md"].decode()
    assert "# Mine" in card
    assert "license: mit" in card
    assert card.endswith("\nMy words.\n")
    assert "float64" not in card
    aotexport_runtime.push(BUNDLE, f"{ADDRESS}@tuned")
    assert {*hub.repositories["me/tiny"]} == {"main", "tuned"}
    assert aotexport_runtime.pull(f"{ADDRESS}@tuned", "tuned") == tmp_path / "tuned"


def test_without_network_the_librarys_cache_is_taken(hub, monkeypatch, tmp_path):
    aotexport_runtime.push(BUNDLE, ADDRESS)
    aotexport_runtime.pull(ADDRESS, "tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    aotexport_runtime.pull(ADDRESS, "again")
    assert files_of(tmp_path / "again") == files_of(BUNDLE)
    with pytest.raises(HubFailed, match=r"^`hf://me/other`: .*HF_HUB_OFFLINE=0"):
        aotexport_runtime.pull("hf://me/other", "other")


def edited(change):
    """Return a change of a repository's manifest."""

    def edit(files):
        manifest = json.loads(files["bundle/bundle.json"])
        change(manifest, files)
        files["bundle/bundle.json"] = json.dumps(manifest).encode()

    return edit


def climbing(manifest, files):
    manifest["files"][0]["path"] = "../../outside"
    files["outside"] = b""


def larger(manifest, files):
    files["bundle/" + manifest["files"][0]["path"]] += bytes(100)


def other(manifest, files):
    name = "bundle/" + manifest["files"][0]["path"]
    files[name] = bytes(len(files[name]))


@pytest.mark.parametrize(
    ("edit", "check"),
    [
        (edited(climbing), "file-path/FileEntry.path"),
        (edited(larger), "file-differs/size"),
        (edited(other), "file-differs/digest"),
        (lambda files: files.pop("bundle/README.md"), "file-missing/file"),
        (lambda files: files.pop("bundle/bundle.json"), "bundle-missing/manifest"),
    ],
    ids=["climbs", "larger", "other bytes", "missing", "no bundle"],
)
def test_a_hostile_repository_leaves_the_bundle_that_was_there(hub, tmp_path, edit, check):
    aotexport_runtime.push(BUNDLE, ADDRESS)
    edit(hub.repositories["me/tiny"]["main"])
    shutil.copytree(BUNDLE, tmp_path / "out")
    with pytest.raises(BundleInvalid) as raised:
        aotexport_runtime.pull(ADDRESS, "out", force=True)
    assert raised.value.check == check
    assert files_of(tmp_path / "out") == files_of(BUNDLE)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "out"]


def test_wrong_requests_are_one_sentence_and_leave_nothing(hub, tmp_path, monkeypatch):
    for address in ("me/tiny", "hf://tiny", "hf://me/tiny/more", "https://me/tiny"):
        with pytest.raises(ArgumentInvalid, match="is no address of a repository"):
            aotexport_runtime.pull(address, "out")
    with pytest.raises(HubFailed, match=r"^`hf://me/none`: .*[Nn]ot [Ff]ound"):
        aotexport_runtime.pull("hf://me/none", "out")
    aotexport_runtime.push(BUNDLE, ADDRESS)
    with pytest.raises(HubFailed, match=r"^`hf://me/tiny@v9`: "):
        aotexport_runtime.pull(f"{ADDRESS}@v9", "out")
    (tmp_path / "file").write_text("mine")
    for output in ("file", "file/below"):
        with pytest.raises(OutputExists):
            aotexport_runtime.pull(ADDRESS, output, force=True)
    with pytest.raises(BundleInvalid, match="no directory `nowhere`"):
        aotexport_runtime.push("nowhere", ADDRESS)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubFailed) as raised:
        aotexport_runtime.push(BUNDLE, ADDRESS)
    said = "Invalid username or password. Log in by `hf auth login`, as one who may"
    assert str(raised.value) == f"`hf://me/tiny`: {said}"
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "cache") == ["file"]


def test_an_image_layout_has_every_file_of_the_bundle_by_its_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["push", str(BUNDLE), "oci:layout:v1", "--licence", "MIT", "--force"])
        assert result.exit_code == 0, result.output

    def blob(described):
        data = (tmp_path / "layout/blobs" / described["digest"].replace(":", "/")).read_bytes()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert (digest, len(data)) == (described["digest"], described["size"])
        return data

    (image,) = json.loads((tmp_path / "layout/index.json").read_text())["manifests"]
    assert result.stdout == f"oci:layout:v1: {image['digest']}\n"
    assert image["annotations"] == {"org.opencontainers.image.ref.name": "v1"}
    manifest = json.loads(blob(image))
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert json.loads(blob(manifest["config"]))["descriptor"] == {"name": "Tiny", "licenses": ["MIT"]}
    found = {layer["annotations"]["org.cncf.model.filepath"]: blob(layer) for layer in manifest["layers"]}
    assert found == files_of(BUNDLE)
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds["weights/model.safetensors"] == "application/vnd.cncf.model.weight.v1.raw"
    result = CliRunner().invoke(app, ["pull", "oci:layout:v1", "-o", "back"])
    assert (result.exit_code, result.stdout) == (0, "back: a bundle, and valid\n")
    assert files_of(tmp_path / "back") == files_of(BUNDLE)
    with pytest.raises(aotexport_runtime.BundleInvalid, match="`layout` has no image `v2`"):
        aotexport_runtime.pull("oci:layout:v2", "other")
    weights = next(each for each in manifest["layers"] if each["mediaType"].endswith("weight.v1.raw"))
    place = tmp_path / "layout/blobs" / weights["digest"].replace(":", "/")
    place.unlink()
    place.write_bytes(b"another")
    with pytest.raises(aotexport_runtime.BundleInvalid):
        aotexport_runtime.pull("oci:layout:v1", "other")
    assert not (tmp_path / "other").exists()
    refused = CliRunner().invoke(app, ["push", str(BUNDLE), "oci:layout"])
    assert (refused.exit_code, "`layout` exists; give force=True (--force)" in refused.output) == (2, True)
