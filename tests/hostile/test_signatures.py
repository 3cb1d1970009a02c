"""Signatures: by keys and certificates, verified by this package and by the library's own command, both ways."""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import aotexport_runtime
from aotexport.cli.app import app
from aotexport_runtime import ArgumentInvalid, BundleInvalid, NotSupported, Signed
from aotexport_runtime.cli.app import main
from tests.golden.refuse import seal

pytest.importorskip("model_signing", reason="needs the extra `sign`")
pytest.importorskip("OpenSSL", reason="needs the extra `sign`")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    no_password = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_password))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
    return key


def write_certificate(
    path: Path, key: ec.EllipticCurvePrivateKey, name: str, issuer: ec.EllipticCurvePrivateKey, days: int = 1
) -> None:
    """Write the certificate of a signer, or of the authority `root` itself, that ends after some days."""
    now = datetime.datetime.now(datetime.UTC)
    is_root = name == "root"
    usages = ("key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only", "crl_sign")
    usage = x509.KeyUsage(
        digital_signature=not is_root, content_commitment=False, key_cert_sign=is_root, **dict.fromkeys(usages, False)
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=100 if name == "root" else 10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(usage, critical=True)
    )
    if not is_root:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
    certificate = builder.sign(issuer, hashes.SHA256())
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of keys, and of a certificate that an authority gave."""
    place = tmp_path_factory.mktemp("keys")
    key = write_key(place / "key.pem")
    write_key(place / "other.pem")
    root = write_key(place / "root.pem")
    write_certificate(place / "root.crt", root, "root", root)
    write_certificate(place / "signer.crt", key, "signer", root)
    write_certificate(place / "past.crt", key, "signer", root, days=-2)
    write_certificate(place / "past root.crt", root, "root", root, days=-2)
    return place


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "bundle")
    return tmp_path / "bundle"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def signed(bundle: Path, keys: Path) -> Path:
    assert run("sign", bundle, "--key", keys / "key.pem") == (
        0,
        f"{bundle}/model.sig: signs every file of the bundle\n",
    )
    return bundle


def library(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "model_signing", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def refusal(bundle: Path, keys: Path, key: str = "key.pub") -> str:
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.load(bundle, trust=Signed(public_key=keys / key))
    return str(caught.value)


def test_bundle_signed_by_a_key_is_loaded_and_verified_by_the_library(signed: Path, keys: Path) -> None:
    module = aotexport_runtime.load(signed, trust=Signed(public_key=keys / "key.pub"))
    assert module.bundle.program_names
    verified = library("verify", "key", signed, "--signature", signed / "model.sig", "--public_key", keys / "key.pub")
    assert verified == "Verification succeeded"
    expected = f"{signed}: signed by this signer, and as it was signed\n"
    assert run("verify-signature", signed, "--key", keys / "key.pub") == (0, expected)
    command = [sys.executable, "-W", "ignore", "-m", "aotexport_runtime", "verify-signature"]
    done = subprocess.run([*command, signed, "--key", keys / "key.pub"], capture_output=True, text=True, check=True)
    assert done.stdout == expected


def test_encrypted_key_signs_by_its_password_and_what_signs_nothing_is_one_error(bundle: Path, keys: Path) -> None:
    key = serialization.load_pem_private_key((keys / "key.pem").read_bytes(), None)
    form, encrypted = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    (keys / "encrypted.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encrypted))
    # One wrong password in 256 leaves a padding that is valid, and bytes that are no key.
    for path, password, why in (
        ("key.pub", "", "Valid PEM but no BEGIN/END delimiters for a private key found"),
        ("encrypted.pem", "", "Password was not given but private key is encrypted"),
        ("encrypted.pem", "other", "(Incorrect password, could not decrypt|Could not deserialize) key"),
    ):
        code, said = run("sign", bundle, "--key", keys / path, *(("--password", password) if password else ()))
        assert code == 2
        assert re.match(f"error: nothing was signed: {why}", said)
    assert run("sign", bundle, "--key", keys / "encrypted.pem", "--password", "word")[0] == 0
    aotexport_runtime.load(bundle, trust=Signed(public_key=keys / "key.pub"))


def test_bundle_signed_by_the_library_is_loaded(bundle: Path, keys: Path) -> None:
    signature = bundle / "model.sig"
    signing = ("sign", "key", bundle, "--signature", signature, "--private_key", keys / "key.pem")
    assert library(*signing) == "Signing succeeded"
    aotexport_runtime.load(bundle, trust=Signed(public_key=keys / "key.pub"))


def test_bundle_signed_by_a_certificate_is_verified_both_ways(bundle: Path, keys: Path) -> None:
    own = ("--key", keys / "key.pem", "--certificate", keys / "signer.crt", "--chain", keys / "root.crt")
    assert run("sign", bundle, *own)[0] == 0
    chain = ("--certificate_chain", keys / "root.crt")
    signature = ("--signature", bundle / "model.sig")
    assert library("verify", "certificate", bundle, *signature, *chain) == "Verification succeeded"
    aotexport_runtime.load(bundle, trust=Signed(certificate_chain=[keys / "root.crt"]))
    (bundle / "model.sig").unlink()
    key = ("--private_key", keys / "key.pem", "--signing_certificate", keys / "signer.crt")
    assert library("sign", "certificate", bundle, *signature, *key, *chain) == "Signing succeeded"
    aotexport_runtime.load(bundle, trust=Signed(certificate_chain=[keys / "root.crt"]))


@pytest.mark.parametrize(("signer", "root"), [("past", "root"), ("signer", "past root")])
def test_certificate_that_has_expired_is_refused_but_for_a_moment_at_which_it_was_valid(
    bundle: Path, keys: Path, signer: str, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--key", keys / "key.pem", "--certificate", keys / f"{signer}.crt", "--chain", keys / "root.crt")
    assert run("sign", bundle, *own)[0] == 0
    chain, now = keys / f"{root}.crt", datetime.datetime.now(datetime.UTC)
    for chosen in ([chain], iter([chain])):
        with pytest.raises(BundleInvalid) as caught:
            aotexport_runtime.load(bundle, trust=Signed(certificate_chain=chosen))
        assert str(caught.value).startswith(f"model.sig: certificates are not valid at {now.date()}T")
    valid = now - datetime.timedelta(days=5)
    aotexport_runtime.load(bundle, trust=Signed(certificate_chain=[chain], at=valid))
    before = (now - datetime.timedelta(days=50)).date()
    assert run("verify-signature", bundle, "--certificate", chain, "--at", valid.isoformat())[0] == 0
    code, said = run("verify-signature", bundle, "--certificate", chain, "--at", before)
    assert code == 1
    assert f"model.sig: certificates are not valid at {before}T00:00:00+00:00: certificate is not yet valid" in said
    command = ["verify-signature", str(bundle), "--certificate", str(chain), "--at"]
    assert main([*command, valid.isoformat()]) == 0
    assert main([*command, "then"]) == 2
    assert capsys.readouterr().err.endswith(
        "error: 'then' is no moment such as 2026-01-31 or 2026-01-31T12:00:00+00:00\n"
    )


FORWARD = "programs/train/forward.json"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (
        lambda root: (root / "bundle.json").write_text((root / "bundle.json").read_text() + " "),
        "model.sig: not as it was signed: `bundle.json` was changed",
    ),
    "resealed": (
        lambda root: [(root / FORWARD).write_text((root / FORWARD).read_text() + " "), seal(root)],
        f"model.sig: not as it was signed: `bundle.json` was changed, `{FORWARD}` was changed",
    ),
    "added": (
        lambda root: (root / "weights" / "more").write_text("x"),
        "model.sig: not as it was signed: `weights/more` was added",
    ),
    "of git": (
        lambda root: [(root / ".git").mkdir(), *((root / n).write_text("x") for n in (".git/a", ".gitattributes"))],
        "model.sig: not as it was signed: `.git/a` was added, `.gitattributes` was added",
    ),
    "a signature's": (
        lambda root: [(root / "weights" / name).write_text("x") for name in ("model.sig", "model.sig.old")],
        "model.sig: not as it was signed: `weights/model.sig` was added, `weights/model.sig.old` was added",
    ),
    "linked": (lambda root: (root / "more").symlink_to("/"), "model.sig: not as it was signed: `more` was added"),
    "removed": (lambda root: (root / "README.md").unlink(), "README.md: missing"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_file_that_is_not_as_it_was_signed_is_named(signed: Path, keys: Path, change, said: str) -> None:
    change(signed)
    assert refusal(signed, keys) == said


def test_signature_of_another_signer_is_refused(signed: Path, keys: Path) -> None:
    assert refusal(signed, keys, "other.pub").startswith("model.sig: no valid signature of this signer: Key mismatch")
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.load(signed, trust=Signed(certificate_chain=[keys / "root.crt"]))
    assert str(caught.value).startswith("model.sig: no valid signature of this signer: ")


def test_bundle_without_a_signature_is_refused(bundle: Path, keys: Path) -> None:
    assert refusal(bundle, keys) == "model.sig: there is no signature; `aotexport sign` makes one"


@pytest.mark.parametrize("data", [b"{}", b"[" * 10000], ids=["object", "deep"])
def test_signature_that_is_none_is_refused(signed: Path, keys: Path, data: bytes) -> None:
    (signed / "model.sig").write_bytes(data)
    assert refusal(signed, keys).startswith("model.sig: no valid signature of this signer: ")


@pytest.mark.parametrize("what", ["pipe", "device", "outside", "directory"])
def test_signature_that_is_no_file_of_the_bundle_is_refused(signed: Path, keys: Path, what: str) -> None:
    path = signed / "model.sig"
    path.rename(signed.parent / "model.sig")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if what == "device" else signed.parent / "model.sig")
    assert refusal(signed, keys) == "model.sig: there is no signature; `aotexport sign` makes one"


def test_signature_that_grows_without_end_is_read_up_to_a_limit(signed: Path, keys: Path) -> None:
    os.truncate(signed / "model.sig", (1 << 26) + 1)
    assert refusal(signed, keys) == "model.sig: larger than the 67108864 bytes of a signature that are read"


def test_forged_payload_is_refused(signed: Path, keys: Path) -> None:
    """A signature holds for the names and digests that were signed, and no others."""
    import base64

    CHANGES["resealed"][0](signed)
    document = json.loads((signed / "model.sig").read_text())
    payload = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"] = []
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    (signed / "model.sig").write_text(json.dumps(document))
    assert refusal(signed, keys).startswith("model.sig: no valid signature of this signer: ")


def test_bundle_that_is_exchanged_while_it_is_open_is_not_the_one_that_is_verified(signed: Path, keys: Path) -> None:
    opened = aotexport_runtime.open_bundle(signed)
    os.rename(signed, signed.with_name("elsewhere"))
    shutil.copytree(signed.with_name("elsewhere"), signed)
    (signed / "bundle.json").write_text("{}")
    aotexport_runtime.load(opened, trust=Signed(public_key=keys / "key.pub"))


def test_requests_without_one_signer_are_refused(signed: Path, keys: Path) -> None:
    with pytest.raises(ArgumentInvalid) as caught:
        aotexport_runtime.load(signed, trust=Signed())
    assert str(caught.value) == "Signed takes one of public_key, certificate_chain and identity"
    with pytest.raises(ArgumentInvalid) as caught:
        aotexport_runtime.load(signed, trust=Signed(identity="me@example.org"))
    assert str(caught.value) == "Signed takes an identity with its issuer"
    with pytest.raises(ArgumentInvalid) as caught:
        aotexport_runtime.load(signed, trust=Signed(public_key="nowhere.pub"))
    assert str(caught.value) == "no file `nowhere.pub`"
    signers: list[dict[str, Any]] = [{"public_key": 5}, {"certificate_chain": [keys / "root.crt"], "at": "2026-01-31"}]
    for signer in signers:
        with pytest.raises(ArgumentInvalid, match=r"^(`Signed`: expected a path|`at`: expected a datetime)"):
            aotexport_runtime.load(signed, trust=Signed(**signer))
    (keys / "no.pub").write_text("no key")
    signers = [{"public_key": keys / "no.pub"}, {"certificate_chain": [keys / "no.pub"]}]
    for signer in signers:
        with pytest.raises(ArgumentInvalid, match=r"^Signed names a signer who cannot be known: "):
            aotexport_runtime.load(signed, trust=Signed(**signer))
    with pytest.raises(NotSupported) as other:
        aotexport_runtime.load(signed, trust=Signed(public_key=keys / "key.pub"), check_digests=False)
    assert str(other.value) == "a signature is one of digests: leave check_digests to its default"
