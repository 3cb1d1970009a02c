"""Signatures by an identity instead of a key, with a Sigstore on this machine."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import aotexport_runtime
from aotexport.cli.app import app
from aotexport_runtime import BundleInvalid, Signed

pytest.importorskip("model_signing", reason="needs the extra `sign`")
pytest.importorskip("OpenSSL", reason="needs the extra `sign`")

from tests.hostile.sigstore_services import ISSUER, Sigstore, sigstore, token

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SIGNER = "signer@example.com"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sigstore")


@pytest.fixture(scope="module")
def services(place: Path) -> Iterator[Sigstore]:
    with sigstore(place) as services:
        yield services


@pytest.fixture(scope="module")
def signed(tiny: Path, place: Path, services: Sigstore) -> Path:
    """Return a bundle that `SIGNER` signed by the command."""
    shutil.copytree(tiny, place / "bundle")
    options = ["--identity", "--identity-token", token(SIGNER), "--trust-config", place / "trust.json"]
    result = CliRunner().invoke(app, ["sign", str(place / "bundle"), *map(str, options)])
    assert (result.exit_code, result.output) == (0, f"{place}/bundle/model.sig: signs every file of the bundle\n")
    return place / "bundle"


def trusted(place: Path, identity: str = SIGNER, issuer: str = ISSUER) -> Signed:
    return Signed(identity=identity, issuer=issuer, trust_config=place / "trust.json")


def test_bundle_signed_by_an_identity_is_loaded_and_verified_by_the_library(
    signed: Path, place: Path, services: Sigstore
) -> None:
    assert len(services.entries) == 1
    assert aotexport_runtime.load(signed, trust=trusted(place)).bundle.program_names
    who = ["--identity", SIGNER, "--identity_provider", ISSUER, "--trust_config", place / "trust.json"]
    command = [sys.executable, "-W", "ignore", "-m", "model_signing", "verify", "sigstore", signed]
    command += ["--signature", signed / "model.sig", *who]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr).strip() == "Verification succeeded"


@pytest.mark.parametrize(
    ("identity", "issuer", "said"),
    [
        ("other@example.com", ISSUER, "Certificate's SANs do not match other@example.com"),
        (SIGNER, "https://other.example.com", "Certificate's OIDCIssuer does not match"),
    ],
)
def test_bundle_of_another_identity_is_refused(
    signed: Path, place: Path, identity: str, issuer: str, said: str
) -> None:
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.load(signed, trust=trusted(place, identity, issuer))
    assert str(caught.value).startswith(f"model.sig: no valid signature of this signer: {said}")


def test_entry_that_the_log_did_not_promise_is_refused(signed: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(signed, tmp_path / "bundle")
    signature = json.loads((signed / "model.sig").read_text())
    (entry,) = signature["verificationMaterial"]["tlogEntries"]
    promise = bytearray(base64.b64decode(entry["inclusionPromise"]["signedEntryTimestamp"]))
    promise[-1] ^= 1
    entry["inclusionPromise"]["signedEntryTimestamp"] = base64.b64encode(promise).decode()
    (tmp_path / "bundle" / "model.sig").write_text(json.dumps(signature))
    with pytest.raises(BundleInvalid, match="SET: invalid inclusion promise"):
        aotexport_runtime.load(tmp_path / "bundle", trust=trusted(place))


def test_file_changed_after_its_identity_signed_it_is_named(signed: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(signed, tmp_path / "bundle")
    (tmp_path / "bundle" / "bundle.json").write_text((signed / "bundle.json").read_text() + " ")
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.load(tmp_path / "bundle", trust=trusted(place))
    assert str(caught.value) == "model.sig: not as it was signed: `bundle.json` was changed"
