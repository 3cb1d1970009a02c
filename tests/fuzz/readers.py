"""Everything that reads bytes of strangers, as functions of an input for `tests.fuzz.guided`.

Each returns if it has read the input, and raises an error of ours if it refuses. A file of safetensors is JSON,
`{"header": ..., "data": ...}`; with `"fit": true` the header's offsets follow from its dtypes and shapes.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import aotexport_runtime
from aotexport_runtime.adapters import add_lora, delete_adapter, load_adapter, save_adapter
from aotexport_runtime.adapters.config import CONFIG_FILE, read_config
from aotexport_runtime.adapters.lora import adapters_of
from aotexport_runtime.bundle.check import _Check
from aotexport_runtime.bundle.directory import BundleDirectory
from aotexport_runtime.bundle.read import Bundle, open_bundle, read_manifest
from aotexport_runtime.bundle.signature import SIGNATURE_NAME, Signed, signing_library, verify_signature
from aotexport_runtime.bundle.weights import load_tensors, read_tensors
from aotexport_runtime.errors import AotExportError, BundleInvalid, Place
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.finetune import checkpoint
from aotexport_runtime.finetune.settings import Settings
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.codec import decode_record, encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import FileEntry, Manifest
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.trees import check_tree
from aotexport_runtime.values.structure import take_apart
from aotexport_runtime.values.trees import builder, leaves
from tests.fuzz import requests
from tests.fuzz.mutations import Mutator

GOLDEN = Path(__file__).parents[1] / "golden" / "v1.0"
LINEAR = GOLDEN / "linear" / "bundle"
WEIGHTS = "weights/model.safetensors"
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MOST_NBYTES = 1 << 16
_ENVIRONMENT = Environment()
_SIGNED_BY = ec.ECDSA(hashes.SHA256())


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads one kind of input.

    Attributes:
        read: the function.
        seeds: returns inputs that it reads.
        share: how many of all inputs are its, in thousandths.
        changed: returns an input with changes that keep its form, where it has the form.
    """

    read: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    share: int
    changed: Callable[[Mutator, bytes], bytes] = Mutator.json_changed


def _golden(pattern: str, most_nbytes: int) -> Iterator[bytes]:
    found = {path.read_bytes() for path in GOLDEN.glob(pattern)}
    return iter(sorted(data for data in found if len(data) <= most_nbytes))


def _plain(data: bytes) -> dict[str, Any]:
    """Return the JSON object that stands for several files."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AotExportError(str(error)) from None


# --- documents of a bundle --------------------------------------------------------------------------------


def _manifest(data: bytes) -> None:
    manifest = read_manifest(data)
    assert read_manifest(encode_record(manifest)) == manifest, "another manifest, when it is written"


def _graph(data: bytes) -> None:
    where = Place("graph.json")
    graph = decode_record(data, Graph, where=where)
    check_graph(graph, _symbols(), set(), where=where)
    again = decode_record(encode_record(graph), Graph, where=where)
    assert again == graph, "another graph, when it is written"


@functools.cache
def _symbols() -> set[str]:
    programs = map(json.loads, _golden("*/bundle/programs/*/program.json", 1 << 20))
    return {dimension["symbol"] for program in programs for dimension in program.get("dimensions", ())}


class _Held(Record, kw_only=True):
    """A tree."""

    tree: Tree


def _tree(data: bytes) -> None:
    held, where = decode_record(data, _Held, where="tree.json"), Place("tree.json")
    check_declared(held, where)
    check_tree(held.tree, 8, where)
    assert all(isinstance(path, str) for path, _ in leaves(held.tree))
    # Sizes are made of them too.
    tensors = [*torch.arange(8).unbind()]
    value = builder(held.tree, lambda leaf: constant_value(leaf.value, _ENVIRONMENT))(tensors)
    encode_record(_Held(tree=take_apart(value, "x", lambda tensor, _: int(tensor))))


def _trees() -> Iterator[bytes]:
    found = set[str]()
    rest: list[Any] = [*map(json.loads, _golden("*/bundle/programs/*/program.json", 1 << 20))]
    while rest:
        part = rest.pop()
        if isinstance(part, dict) and "items" in part and "kind" in part:
            found.add(json.dumps({"tree": part}, sort_keys=True))
        elif isinstance(part, dict | list):
            rest += part.values() if isinstance(part, dict) else part
    return iter(text.encode() for text in sorted(found) if len(text) < 2000)


class _Documents(Bundle):
    """A bundle whose documents are in memory."""

    def __init__(self, documents: dict[str, bytes]) -> None:
        super().__init__(_directory(), read_manifest(documents.get("bundle.json", b"")))
        self._documents = documents

    def read(self, path: str) -> bytes:
        if path not in self._documents:
            raise BundleInvalid("missing", where=path, check="file-missing/file")
        return self._documents[path]


class _DocumentsCheck(_Check, _Documents):
    """The check of a bundle without its tensors."""

    def stored(self, index: int) -> None:
        pass


def _documents(data: bytes) -> None:
    bundle = _Documents({path: msgspec.json.encode(document) for path, document in _plain(data).items()})
    faults: list[BundleInvalid] = []
    check = _DocumentsCheck(bundle._documents)
    check.faults = faults
    check.programs_and_calls(bundle.program_names)
    for name in bundle.target_names:
        check.target_programs(name)
    with contextlib.suppress(AotExportError):
        bundle.read_graphs()
        for entry in bundle.manifest.testvectors:
            bundle.vector(entry)
        for name, program in itertools.product(bundle.target_names, bundle.program_names):
            bundle.compiled(name, program)
        assert not faults, f"refused by the check alone: {faults[0]}"
        return
    assert faults, "refused by a load alone"
    raise faults[0]


def _bundles() -> Iterator[bytes]:
    for root in sorted(GOLDEN.glob("*/bundle")):
        files = {str(path.relative_to(root)): json.loads(path.read_bytes()) for path in sorted(root.rglob("*.json"))}
        data = json.dumps(files).encode()
        if len(data) <= 30_000:
            yield data


# --- files of safetensors ---------------------------------------------------------------------------------


def _safetensors(stored: Any) -> bytes:
    if not isinstance(stored, dict) or not isinstance(header := stored.get("header"), dict):
        return b""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        header = header | {"__metadata__": texts}
    try:
        data = base64.b64decode(stored["data"])
    except (KeyError, TypeError, ValueError):
        data = b""
    if stored.get("fit") is True:
        header, data = _fitted(header, data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _fitted(header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    end, entries = 0, dict[str, Any]()
    for key, entry in header.items():
        entries[key] = entry
        if isinstance(entry, dict) and isinstance(shape := entry.get("shape"), list) and key != "__metadata__":
            sizes = [size for size in shape if type(size) is int]
            nbytes = math.prod(sizes) * _SIZES.get(str(entry.get("dtype")), 1)
            if 0 <= nbytes <= _MOST_NBYTES:
                entries[key] = entry | {"data_offsets": [end, end + nbytes]}
                end += nbytes
    return entries, data[:end].ljust(end, b"\x3f") if end <= 4 * _MOST_NBYTES else data


def _apart(file: bytes) -> dict[str, Any]:
    """Return a file of safetensors as JSON."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    for key, value in header.get("__metadata__", {}).items():
        if value[:1] == "{":
            header["__metadata__"][key] = json.loads(value)
    return {"header": header, "data": base64.b64encode(file[end:]).decode(), "fit": True}


@functools.cache
def _place() -> Path:
    """Return a directory for files, in memory."""
    place = Path(tempfile.mkdtemp(prefix="aotexport-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (place / "weights").mkdir()
    (place / "bundle.json").write_bytes(b"{}")
    return place


@functools.cache
def _directory() -> BundleDirectory:
    return BundleDirectory(_place())


@functools.cache
def _linear() -> dict[str, Any]:
    """Return a manifest with few files."""
    document = json.loads((LINEAR / "bundle.json").read_bytes())
    files = [entry for entry in document["files"] if entry["path"].startswith(("programs/", "weights/"))]
    return {key: value for key, value in document.items() if key != "testvectors"} | {"files": files}


@functools.cache
def _manifest_of_linear() -> Manifest:
    return read_manifest(json.dumps(_linear()).encode())


def _read_weights(file: bytes, manifest: Manifest) -> None:
    (_place() / WEIGHTS).write_bytes(file)
    entry = FileEntry(path=WEIGHTS, nbytes=len(file), sha256="0" * 64)
    bundle = Bundle(_directory(), msgspec.structs.replace(manifest, files=(entry,)))
    tensors = load_tensors(bundle, manifest.state, _ENVIRONMENT.form)
    assert all(tensor.sum(dtype=torch.float64) is not None for tensor in tensors.values() if not tensor.is_complex())


def _weights(data: bytes) -> None:
    document = _plain(data)
    manifest = read_manifest(msgspec.json.encode(_linear() | {"state": document.get("state")}))
    _read_weights(_safetensors(document), manifest)


def _stored_weights() -> Iterator[bytes]:
    for root in sorted(GOLDEN.glob("*/bundle")):
        manifest, file = json.loads((root / "bundle.json").read_bytes()), root / WEIGHTS
        if manifest.get("state") and file.is_file() and file.stat().st_size < 2000:
            yield json.dumps(_apart(file.read_bytes()) | {"state": manifest["state"]}).encode()


def _file(data: bytes) -> None:
    with contextlib.suppress(AotExportError):
        read_tensors(data, where="file")
    _read_weights(data, _manifest_of_linear())


def _files() -> Iterator[bytes]:
    return iter([(LINEAR / WEIGHTS).read_bytes()])


# --- adapters ---------------------------------------------------------------------------------------------


@functools.cache
def _module() -> Any:
    return aotexport_runtime.load(LINEAR)


def _config(data: bytes) -> None:
    config = read_config(data, Path(CONFIG_FILE))
    assert config.scaling("model.layers.0.weight", config.r) is not None


def _configs() -> Iterator[bytes]:
    return (json.dumps(json.loads(data)["config"]).encode() for data in _adapters())


def _adapter(data: bytes) -> None:
    document, place, module = _plain(data), _place(), _module()
    (place / CONFIG_FILE).write_bytes(msgspec.json.encode(document.get("config")))
    (place / "adapter_model.safetensors").write_bytes(_safetensors(document))
    try:
        load_adapter(module, place, name="x")
    finally:
        is_left = "x" in adapters_of(module).configs
        if is_left:
            delete_adapter(module, "x")
    assert is_left


def _adapters() -> Iterator[bytes]:
    torch.manual_seed(0)
    for options in ({}, {"use_rslora": True, "bias": "all"}, {"use_dora": True}, {"modules_to_save": ("0",)}):
        module = _module()
        with tempfile.TemporaryDirectory() as directory:
            add_lora(module, "all-linear", r=2, **options)
            save_adapter(module, directory)
            delete_adapter(module, "default")
            config = json.loads(Path(directory, CONFIG_FILE).read_bytes())
            stored = _apart(Path(directory, "adapter_model.safetensors").read_bytes())
            yield json.dumps({"config": config | {"alpha_pattern": {"0": 4.0}}, **stored}).encode()


# --- checkpoints and signatures ---------------------------------------------------------------------------


@functools.cache
def _run() -> tuple[Any, Any, checkpoint.Identity]:
    torch.manual_seed(0)
    module = aotexport_runtime.load(LINEAR)
    optimizer = torch.optim.AdamW(checkpoint.trained(module).values())
    for parameter in checkpoint.trained(module).values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer, checkpoint.Identity.of(module, dataclasses.asdict(Settings(loss="classification")), 8)


def _checkpoint(data: bytes) -> None:
    path = _place() / checkpoint.FILE
    path.write_bytes(_safetensors(_plain(data)))
    assert 0 <= checkpoint.read(path, *_run(), 8) <= 8


def _checkpoints() -> Iterator[bytes]:
    path = _place() / checkpoint.FILE
    checkpoint.write(path, *_run(), 7)
    yield json.dumps(_apart(path.read_bytes())).encode()


@functools.cache
def _key() -> tuple[ec.EllipticCurvePrivateKey, Path]:
    """Return a key, and a directory with files of it and of its public key."""
    key, place = ec.derive_private_key(2026, ec.SECP256R1()), Path(tempfile.mkdtemp(prefix="aotexport-fuzz-"))
    no_password, public = serialization.NoEncryption(), serialization.PublicFormat.SubjectPublicKeyInfo
    form = serialization.PrivateFormat.PKCS8
    (place / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_password))
    (place / "key.pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
    return key, place


def _signature(data: bytes) -> None:
    """Read a signature, whose payload is JSON here; `"fit": true` signs it again."""
    document, (key, place) = _plain(data), _key()
    signature, payload = document.get("signature"), json.dumps(document.get("payload")).encode()
    envelope = signature.get("dsseEnvelope") if isinstance(signature, dict) else None
    if isinstance(envelope, dict):
        envelope["payload"] = base64.b64encode(payload).decode()
        if document.get("fit") is True:
            bytes_of_signature = key.sign(signing_library("_signing.sign_sigstore_pb").pae(payload), _SIGNED_BY)
            envelope["signatures"] = [{"sig": base64.b64encode(bytes_of_signature).decode()}]
    (place / SIGNATURE_NAME).write_text(json.dumps(signature))
    verify_signature(open_bundle(LINEAR), Signed(public_key=place / "key.pub", signature=place / SIGNATURE_NAME))
    resources = document["payload"]["predicate"]["resources"]
    assert {each["name"]: bytes.fromhex(each["digest"]) for each in resources} == _digests(), "it signs other files"


def _digests() -> dict[str, bytes]:
    files = [path for path in LINEAR.rglob("*") if path.is_file()]
    return {path.relative_to(LINEAR).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files}


def _signatures() -> Iterator[bytes]:
    path = _key()[1] / SIGNATURE_NAME
    signing = signing_library("signing").Config().use_elliptic_key_signer(private_key=path.with_name("key"))
    signing.sign(LINEAR, path)
    signature = json.loads(path.read_bytes())
    payload = json.loads(base64.b64decode(signature["dsseEnvelope"].pop("payload")))
    yield json.dumps({"fit": True, "payload": payload, "signature": signature}).encode()


# --- requests ---------------------------------------------------------------------------------------------


def _request(data: bytes) -> None:
    """Read a request behind four bytes, which say how much of it is JSON; 0: all."""
    nbytes, body = int.from_bytes(data[:4], "little", signed=True), bytearray(data[4:])
    found = requests.outcome(body, nbytes or None)
    assert not found.startswith("!"), found
    if found != "read":
        raise AotExportError(found)


def _request_changed(mutator: Mutator, data: bytes) -> bytes:
    nbytes = int.from_bytes(data[:4], "little") or len(data) - 4
    head, binary = mutator.json_changed(data[4 : 4 + nbytes]), data[4 + nbytes :]
    return (len(head) if binary else 0).to_bytes(4, "little") + head + binary


def _requests() -> Iterator[bytes]:
    for number in range(40):
        document, binary = requests.valid(Mutator(f"seed {number}"))
        head = json.dumps(document).encode()
        yield (len(head) if binary else 0).to_bytes(4, "little") + head + binary


READERS = {
    "request": Reader(_request, _requests, 450, _request_changed),
    "tree": Reader(_tree, _trees, 100),
    "config": Reader(_config, _configs, 300),
    "file": Reader(_file, _files, 100, Mutator.header_changed),
    "manifest": Reader(_manifest, functools.partial(_golden, "*/bundle/bundle.json", 6000), 45),
    "graph": Reader(_graph, functools.partial(_golden, "*/bundle/programs/*/*[gdte].json", 3000), 12),
    "weights": Reader(_weights, _stored_weights, 4),
    "adapter": Reader(_adapter, _adapters, 3),
    "documents": Reader(_documents, _bundles, 1),
    "checkpoint": Reader(_checkpoint, _checkpoints, 4),
    "signature": Reader(_signature, _signatures, 2),
}
"""The readers by the names of what they read."""
