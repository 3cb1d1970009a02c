"""`sign bundle/` and `verify-signature bundle/`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.bundle.signature import SIGNATURE_NAME, Signed, moment, signing_library, verify_signature
from aotexport_runtime.cli.output import BUNDLE
from aotexport_runtime.errors import ArgumentInvalid, attempt, first_line

_EXAMPLE = """\b
Example:
  openssl ecparam -name prime256v1 -genkey -noout -out key.pem
  openssl ec -in key.pem -pubout -out key.pub
  aotexport sign bundle/ --key key.pem
  aotexport verify-signature bundle/ --key key.pub
"""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Sign a bundle.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--key", type=_FILE, help="Private key (PEM, elliptic curve).")
@click.option("--password", envvar="AOTEXPORT_KEY_PASSWORD", help="Password of the key.")
@click.option("--certificate", type=_FILE, help="Certificate of the key.")
@click.option(
    "--chain", type=_FILE, multiple=True, help="Certificate of an authority above; may be given several times."
)
@click.option("--identity", is_flag=True, help="Sign without a key, by an identity of an OpenID provider (Sigstore).")
@click.option("--identity-token", envvar="AOTEXPORT_IDENTITY_TOKEN", help="Token of that identity.")
@click.option("--trust-config", type=_FILE, help="Trust of a Sigstore of one's own.")
def sign(
    bundle: Path,
    key: Path | None,
    password: str | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    identity: bool,
    identity_token: str | None,
    trust_config: Path | None,
) -> None:
    """Sign every file of BUNDLE by OpenSSF Model Signing; the signature is its file `model.sig`.

    Every file is compared with its digest first. `model_signing verify` verifies the signature as well.
    """
    if (key is None) != identity:
        raise click.UsageError("give --key, or --identity")
    open_bundle(bundle)
    config = signing_library("signing").Config()
    hashing = signing_library("hashing").Config().set_ignored_paths(paths=[SIGNATURE_NAME], ignore_git_paths=False)
    # Written elsewhere and moved: what the library signs is all that is in the directory.
    with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as place:
        written = Path(place, SIGNATURE_NAME)

        def write() -> None:
            if identity:
                config.use_sigstore_signer(identity_token=identity_token, trust_config=trust_config)
            elif certificate is not None:
                config.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=chain)
            else:
                # The library passes it on to one that takes bytes.
                config.use_elliptic_key_signer(private_key=key, password=password and password.encode())
            config.set_hashing_config(hashing).sign(bundle.resolve(), written)

        if (error := attempt(write)) is not None:
            raise ArgumentInvalid(f"nothing was signed: {first_line(error) or type(error).__name__}") from None
        os.replace(written, bundle / SIGNATURE_NAME)
    click.echo(f"{bundle / SIGNATURE_NAME}: signs every file of the bundle")


@click.command("verify-signature", short_help="Verify who signed a bundle.", epilog=_EXAMPLE)
@BUNDLE
@click.option("--key", "public_key", type=_FILE, help="Public key of the signer.")
@click.option(
    "--certificate",
    "certificate_chain",
    type=_FILE,
    multiple=True,
    help="Certificate of an authority; may be given several times.",
)
@click.option("--identity", metavar="NAME", help="Identity of the signer at --issuer.")
@click.option("--issuer", metavar="URL", help="OpenID provider.")
@click.option("--trust-config", type=_FILE, help="Trust of a Sigstore of one's own.")
@click.option("--signature", type=_FILE, help="The signature (default: model.sig in the bundle).")
@click.option("--at", metavar="TIME", help="When certificates must be valid (default: now), for archives.")
def verify_signature_command(bundle: Path, at: str | None, **given: Any) -> None:
    """Verify that BUNDLE is as its signer left it: no file was changed, added, removed or renamed."""
    verify_signature(open_bundle(bundle), Signed(**given, at=None if at is None else moment(at)))
    click.echo(f"{bundle}: signed by this signer, and as it was signed")
