"""Signatures of bundles by OpenSSF Model Signing: who signed, and that nothing was changed, added, removed or renamed.

The library `model_signing` reads signatures, and compares the signed digests with those that the loader goes by.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from aotexport_runtime.bundle.directory import MANIFEST_NAME, open_regular, private_file, read_most
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, NotSupported, attempt, first_line
from aotexport_runtime.values.arguments import check_type, path_of

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
        at: the moment at which certificates must be valid; None: now. For keys and identities there is none: keys do
            not expire, and a transparency log says when an identity signed.
    """

    public_key: str | os.PathLike[str] | None = None
    certificate_chain: Iterable[str | os.PathLike[str]] = ()
    identity: str | None = None
    issuer: str | None = None
    trust_config: str | os.PathLike[str] | None = None
    signature: str | os.PathLike[str] | None = None
    at: datetime | None = None


def verify_signature(bundle: Bundle, signed: Signed) -> None:
    """Refuse an open bundle that is not as its signer has left it, who must be `signed`.

    Files of the manifest are compared by the digests in it: compare these with the files, or read the bundle through
    `Bundle`, which does.

    Raises:
        ArgumentInvalid: `signed` names no signer, or several.
        BundleInvalid: no signature, or not of this signer, or its certificates are not valid at the moment; or names
            files that were changed, added or removed.
        NotSupported: `model_signing` is not installed.
    """
    chain = [os.fspath(path) for path in signed.certificate_chain]
    config = _verifier(signed, chain)
    name = str(signed.signature or SIGNATURE_NAME)
    try:
        with bundle.directory.open(name) if signed.signature is None else open_regular(name) as stream:
            data = read_most(stream, MOST_NBYTES)
    except (OSError, ValueError, BundleInvalid):
        _refuse("there is no signature; `aotexport sign` makes one", name, "signature-invalid/missing")
    if len(data) > MOST_NBYTES:
        _refuse(f"larger than the {MOST_NBYTES} bytes of a signature that are read", name, "signature-invalid/size")
    own = {SIGNATURE_NAME}
    if signed.signature is not None:  # It may lie in the bundle as well.
        own.add(os.path.relpath(os.path.realpath(name), bundle.directory.path))
    with private_file(data) as place:

        def check() -> None:
            config.set_hashing_config(_Found(bundle, name, own)).verify(bundle.directory.files, place)
            if chain:
                _check_time(place, chain, signed.at or datetime.now(UTC), name)

        error = attempt(check)
    if isinstance(error, BundleInvalid):
        raise error
    if error is not None:
        reason = first_line(error) or type(error).__name__
        _refuse(f"no valid signature of this signer: {reason}", name, "signature-invalid/signer")


def _refuse(message: str, where: str, check: str) -> NoReturn:
    raise BundleInvalid(message, where=where, check=check) from None


def _check_time(signature: Path, chain: list[str], at: datetime, where: str) -> None:
    """Refuse certificates that are not valid at a moment (RFC 5280, 6.1.3): the library goes by the signer's first."""
    crypto, x509 = importlib.import_module("OpenSSL.crypto"), importlib.import_module("cryptography.x509")
    material = signing_library("_signing.sign_sigstore_pb").Signature.read(signature).bundle.verification_material
    found = [x509.load_der_x509_certificate(each.raw_bytes) for each in material.x509_certificate_chain.certificates]
    signer, *between = map(crypto.X509.from_cryptography, found)
    store = crypto.X509Store()
    for path in chain:
        for each in x509.load_pem_x509_certificates(Path(path).read_bytes()):
            store.add_cert(crypto.X509.from_cryptography(each))
    store.set_time(at.astimezone(UTC))
    try:
        crypto.X509StoreContext(store, signer, between).verify_certificate()
    except crypto.X509StoreContextError as error:
        moment = at.astimezone(UTC).isoformat(timespec="seconds")
        message = f"certificates are not valid at {moment}: {error}. Of an archive, say when they were (`at`)"
        _refuse(message, where, "signature-invalid/signer")


def moment(text: str) -> datetime:
    """Return a moment in ISO 8601, in UTC where it says no zone; refuse what is none (`ArgumentInvalid`)."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentInvalid(f"{text!r} is no moment such as 2026-01-31 or 2026-01-31T12:00:00+00:00") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _verifier(signed: Signed, chain: list[str]) -> Any:
    if sum((signed.public_key is not None, bool(chain), signed.identity is not None)) != 1:
        raise ArgumentInvalid("Signed takes one of public_key, certificate_chain and identity")
    if (signed.identity is None) != (signed.issuer is None):
        raise ArgumentInvalid("Signed takes an identity with its issuer")
    check_type("at", signed.at, (datetime, NoneType), "a datetime")
    if signed.at is not None and not chain:
        raise ArgumentInvalid("Signed takes `at` with certificates")
    for path in (signed.public_key, *chain, signed.trust_config):
        if path is not None and not path_of("Signed", path).is_file():
            raise ArgumentInvalid(f"no file `{path}`")
    config = signing_library("verifying").Config()

    def verifier() -> Any:
        if signed.public_key is not None:
            return config.use_elliptic_key_verifier(public_key=signed.public_key)
        if chain:
            return config.use_certificate_verifier(certificate_chain=chain)
        trust = None if signed.trust_config is None else Path(signed.trust_config)
        return config.use_sigstore_verifier(identity=signed.identity, oidc_issuer=signed.issuer, trust_config=trust)

    found = attempt(verifier)
    if isinstance(found, Exception):
        raise ArgumentInvalid(f"Signed names a signer who cannot be known: {first_line(found)}") from None
    return found


def signing_library(module: str) -> Any:
    """Return a module of `model_signing`; refuse (`NotSupported`) where it is not installed."""
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        needed = f"signatures need the packages of the extra `sign` ({error})"
        raise NotSupported(f"{needed}: pip install 'aotexport-runtime[sign]'") from None


class _Found:
    """The files of an open bundle, in the place of the library's own reading of a directory."""

    def __init__(self, bundle: Bundle, where: str, own: set[str]) -> None:
        self._bundle = bundle
        self._where = where
        self._own = own

    def add_ignored_paths(self, *, model_path: Any, paths: Iterable[Any]) -> None:
        """Pass over the names that the signer left out: nothing may stand beside what is signed."""

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> _Found:
        """Return the digests of the bundle's files, to compare with the signed ones."""
        return self

    def __eq__(self, signed: object) -> bool:
        """Return True, as the library compares, or name the files that are not as they were signed."""
        expected: dict[str, tuple[str, str]] = {
            resource.identifier: (resource.digest.algorithm, resource.digest.digest_hex)
            for resource in signed.resource_descriptors()  # type: ignore[attr-defined]
        }
        if any(algorithm != "sha256" for algorithm, _ in expected.values()):
            _refuse("signed by other digests than SHA-256 of whole files", self._where, "signature-invalid/digests")
        listed = {entry.path: entry.sha256 for entry in self._bundle.manifest.files}
        listed[MANIFEST_NAME] = self._bundle.manifest_sha256
        present = {*self._names()}
        both = present & expected.keys()
        changed = {name for name in both if (listed.get(name) or self._digest(name)) != expected[name][1]}
        added, removed = (present | listed.keys()) - expected.keys(), expected.keys() - present
        found = {"added": added, "removed": removed, "changed": changed}
        differences = [f"`{name}` was {how}" for how, names in found.items() for name in sorted(names)]
        if differences:
            _refuse(f"not as it was signed: {', '.join(differences[:20])}", self._where, "signature-invalid/files")
        return True

    def _names(self) -> Iterable[str]:
        root = str(self._bundle.directory.files)
        for directory, subdirectories, files in os.walk(root, onerror=self._unread):
            links = [name for name in subdirectories if os.path.islink(os.path.join(directory, name))]
            found = (os.path.relpath(os.path.join(directory, name), root) for name in (*files, *links))
            yield from (name for name in found if name not in self._own)

    def _unread(self, error: OSError) -> NoReturn:
        _refuse(f"a directory of the bundle cannot be read: {error.strerror}", self._where, "signature-invalid/files")

    def _digest(self, name: str) -> str:
        if (self._bundle.directory.files / name).is_symlink():
            return ""
        with contextlib.suppress(BundleInvalid), self._bundle.directory.open(name) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        return ""
