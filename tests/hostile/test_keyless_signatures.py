"""Signatures by an identity instead of a key: one that `aotexport sign --identity` made with a Sigstore of its own.

`keyless/trust.json` is what clients of that Sigstore trust: its authority, its logs, and services that are gone.
"""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import aotexport_runtime
from aotexport.cli.app import app
from aotexport_runtime import BundleInvalid, Signed

pytest.importorskip("model_signing", reason="needs the extra `sign`")
pytest.importorskip("OpenSSL", reason="needs the extra `sign`")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BUNDLE = Path(__file__).parents[1] / "golden/v1.0/linear/bundle"
SIGNATURE, TRUST = (Path(__file__).parent / "keyless" / name for name in ("model.sig", "trust.json"))
SIGNER, ISSUER = "signer@example.com", "https://login.example.com"


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """Return the bundle that `SIGNER` signed."""
    shutil.copytree(BUNDLE, tmp_path / "bundle")
    shutil.copy(SIGNATURE, tmp_path / "bundle")
    return tmp_path / "bundle"


def trusted(identity: str = SIGNER, issuer: str = ISSUER) -> Signed:
    return Signed(identity=identity, issuer=issuer, trust_config=TRUST)


def refusal(bundle: Path, trust: Signed) -> str:
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.load(bundle, trust=trust)
    return str(caught.value)


def test_bundle_signed_by_an_identity_is_loaded_and_verified_by_the_library(signed: Path) -> None:
    assert aotexport_runtime.load(signed, trust=trusted()).bundle.program_names
    who = ["--identity", SIGNER, "--identity_provider", ISSUER, "--trust_config", TRUST]
    command = [sys.executable, "-W", "ignore", "-m", "model_signing", "verify", "sigstore", signed]
    command += ["--signature", signed / "model.sig", *who]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr).strip() == "Verification succeeded"


def test_bundle_of_another_identity_is_refused(signed: Path) -> None:
    by_this_signer = "model.sig: no valid signature of this signer: "
    said = refusal(signed, trusted("other@example.com"))
    assert said.startswith(f"{by_this_signer}Certificate's SANs do not match other@example.com")
    said = refusal(signed, trusted(issuer="https://other.example.com"))
    assert said.startswith(f"{by_this_signer}Certificate's OIDCIssuer does not match")


def test_entry_that_the_log_did_not_promise_is_refused(signed: Path) -> None:
    signature = json.loads(SIGNATURE.read_text())
    (entry,) = signature["verificationMaterial"]["tlogEntries"]
    promise = bytearray(base64.b64decode(entry["inclusionPromise"]["signedEntryTimestamp"]))
    promise[-1] ^= 1
    entry["inclusionPromise"]["signedEntryTimestamp"] = base64.b64encode(promise).decode()
    (signed / "model.sig").write_text(json.dumps(signature))
    assert "SET: invalid inclusion promise" in refusal(signed, trusted())


def test_file_changed_after_its_identity_signed_it_is_named(signed: Path) -> None:
    with (signed / "bundle.json").open("a") as file:
        file.write(" ")
    assert refusal(signed, trusted()) == "model.sig: not as it was signed: `bundle.json` was changed"


def test_services_that_cannot_be_reached_are_one_error_and_sign_nothing(signed: Path) -> None:
    (signed / "model.sig").unlink()
    options = ["--identity", "--identity-token", "token", "--trust-config", str(TRUST)]
    result = CliRunner().invoke(app, ["sign", str(signed), *options])
    assert (result.exit_code, result.stderr) == (2, "error: nothing was signed: NetworkError\n")
    assert not (signed / "model.sig").exists()
