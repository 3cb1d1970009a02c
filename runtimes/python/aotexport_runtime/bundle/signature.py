"""Signatures of bundles by OpenSSF Model Signing: who signed, and that nothing was changed, added, removed or renamed.

The library `model_signing` reads signatures and knows keys, certificates and identities. It does not look at files
here: what it compares with the signed digests are the manifest as it was read, and the digests in it, with which the
loader compares the bytes that it uses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotexport_runtime.bundle.directory import MANIFEST_NAME, at_descriptor
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, NotSupported, first_line

SIGNATURE_NAME = "model.sig"
MOST_NBYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Signed:
    """Whose signature a bundle must have: give a key, the certificates of an authority, or an identity.

    Attributes:
        public_key: file of an elliptic-curve key (PEM).
        certificate_chain: files of certificates (PEM) of authorities that may have certified the signer.
        identity: identity of the signer at an OpenID provider, for signatures without keys (Sigstore).
        issuer: that provider.
        trust_config: file of the trust of a Sigstore of one's own; None: the public one.
        signature: the signature; None: `model.sig` in the bundle.
    """

    public_key: str | os.PathLike[str] | None = None
    certificate_chain: Iterable[str | os.PathLike[str]] = ()
    identity: str | None = None
    issuer: str | None = None
    trust_config: str | os.PathLike[str] | None = None
    signature: str | os.PathLike[str] | None = None


def verify_signature(bundle: Bundle, signed: Signed) -> None:
    """Refuse a bundle that is not as its signer has left it.

    Files of the manifest are compared by the digests in it: compare these with the files, or read the bundle through
    `Bundle`, which does.

    Args:
        bundle: an open bundle.
        signed: whose signature it must have.

    Raises:
        ArgumentInvalid: `signed` names no signer, or several.
        BundleInvalid: no signature, or not of this signer; or names files that were changed, added or removed.
        NotSupported: `model_signing` is not installed.
    """
    config = _verifier(signed)
    place = bundle.directory.files / SIGNATURE_NAME if signed.signature is None else Path(signed.signature)
    name = str(signed.signature or SIGNATURE_NAME)
    try:
        stream = place.open("rb")
    except OSError:
        raise BundleInvalid(
            "there is no signature; `aotexport sign` makes one", where=name, check="signature-invalid/missing"
        ) from None
    with stream:
        if os.fstat(stream.fileno()).st_size > MOST_NBYTES:
            raise BundleInvalid(
                f"larger than the {MOST_NBYTES} bytes of a signature that are read",
                where=name,
                check="signature-invalid/size",
            )
        try:
            config.set_hashing_config(_Found(bundle, name)).verify(
                bundle.directory.files, at_descriptor(stream.fileno(), place)
            )
        except BundleInvalid:
            raise
        except Exception as error:  # noqa: BLE001 - errors of the libraries that check have no class in common
            reason = first_line(error) or type(error).__name__
            raise BundleInvalid(
                f"no valid signature of this signer: {reason}", where=name, check="signature-invalid/signer"
            ) from None


def _verifier(signed: Signed) -> Any:
    chain = [os.fspath(path) for path in signed.certificate_chain]
    if sum((signed.public_key is not None, bool(chain), signed.identity is not None)) != 1:
        raise ArgumentInvalid("Signed takes one of public_key, certificate_chain and identity")
    if (signed.identity is None) != (signed.issuer is None):
        raise ArgumentInvalid("Signed takes an identity with its issuer")
    for path in (signed.public_key, *chain, signed.trust_config):
        if path is not None and not Path(path).is_file():
            raise ArgumentInvalid(f"no file `{path}`")
    config = signing_library("verifying").Config()
    if signed.public_key is not None:
        return config.use_elliptic_key_verifier(public_key=signed.public_key)
    if chain:
        return config.use_certificate_verifier(certificate_chain=chain)
    trust = None if signed.trust_config is None else Path(signed.trust_config)
    return config.use_sigstore_verifier(identity=signed.identity, oidc_issuer=signed.issuer, trust_config=trust)


def signing_library(module: str) -> Any:
    """Return a module of `model_signing`.

    Raises:
        NotSupported: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        raise NotSupported(
            f"signatures need the packages of the extra `sign` ({error}): pip install 'aotexport-runtime[sign]'"
        ) from None


class _Found:
    """The files of an open bundle, in the place of the library's own reading of a directory."""

    def __init__(self, bundle: Bundle, where: str) -> None:
        self._bundle = bundle
        self._where = where
        self._ignored = {SIGNATURE_NAME}

    def add_ignored_paths(self, *, model_path: Any, paths: Iterable[Any]) -> None:
        """Note the names that the signer left out."""
        self._ignored |= set(map(str, paths))

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> _Found:
        """Return the digests of the bundle's files, to compare with the signed ones."""
        return self

    def __eq__(self, signed: object) -> bool:
        """Return True; the library compares so.

        Raises:
            BundleInvalid: names the files that are not as they were signed.
        """
        expected: dict[str, tuple[str, str]] = {
            resource.identifier: (resource.digest.algorithm, resource.digest.digest_hex)
            for resource in signed.resource_descriptors()  # type: ignore[attr-defined]
        }
        if any(algorithm != "sha256" for algorithm, _ in expected.values()):
            raise BundleInvalid(
                "signed by other digests than SHA-256 of whole files",
                where=self._where,
                check="signature-invalid/digests",
            )
        listed = {entry.path: entry.sha256 for entry in self._bundle.manifest.files}
        listed[MANIFEST_NAME] = self._bundle.manifest_sha256
        present = {name for name in self._names() if name in listed or not self._is_ignored(name)}
        differences = [f"`{name}` was added" for name in sorted((present | listed.keys()) - expected.keys())]
        differences += [f"`{name}` was removed" for name in sorted(expected.keys() - present)]
        differences += [
            f"`{name}` was changed"
            for name in sorted(present & expected.keys())
            if (listed.get(name) or self._digest(name)) != expected[name][1]
        ]
        if differences:
            raise BundleInvalid(
                f"not as it was signed: {', '.join(differences[:20])}",
                where=self._where,
                check="signature-invalid/files",
            )
        return True

    def _is_ignored(self, name: str) -> bool:
        return any(name == other or name.startswith(f"{other}/") for other in self._ignored)

    def _names(self) -> Iterable[str]:
        root = str(self._bundle.directory.files)
        for directory, subdirectories, files in os.walk(root):
            links = [name for name in subdirectories if os.path.islink(os.path.join(directory, name))]
            for name in (*files, *links):
                yield os.path.relpath(os.path.join(directory, name), root)

    def _digest(self, name: str) -> str:
        path = self._bundle.directory.files / name
        if path.is_symlink() or not path.is_file():
            return ""
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
