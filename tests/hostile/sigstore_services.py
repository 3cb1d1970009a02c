"""The services of a Sigstore on this machine: an authority, a transparency log, the page of an OpenID provider.

The authority (Fulcio's REST interface, version 2) certifies whom a token names. The log (Rekor's, version 1) keeps what
was signed in a Merkle tree of one leaf, and promises it. Clients trust both by the file `trust.json`.
"""

import base64
import datetime
import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ISSUER = "https://login.example.com"
_ISSUER_OF_A_TOKEN = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_NO_USAGES = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)


class Sigstore:
    """Keys and answers of the services.

    Attributes:
        entries: bodies that the log took.
    """

    def __init__(self) -> None:
        self.authority, self.log, self.certificate_log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.root = self._certificate("authority", self.authority.public_key(), is_authority=True).sign(
            self.authority, hashes.SHA256()
        )
        self.entries: list[dict[str, Any]] = []

    def certify(self, request: dict[str, Any], authorization: str) -> dict[str, Any]:
        """Return the chain of a certificate for the key of `request` and the subject of the token."""
        pem = base64.b64decode(request["certificateSigningRequest"])
        public_key = x509.load_pem_x509_csr(pem).public_key()
        assert isinstance(public_key, ec.EllipticCurvePublicKey)
        claims = json.loads(_unpadded(authorization.removeprefix("Bearer ").split(".")[1]))
        builder = (
            self._certificate("signer", public_key, is_authority=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(claims["sub"])]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_OF_A_TOKEN, claims["iss"].encode()), critical=False)
        )
        # Signed twice: the log's timestamp is about the certificate without it.
        draft = builder.add_extension(x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamps(b"")), critical=False)
        signed = draft.sign(self.authority, hashes.SHA256()).tbs_precertificate_bytes
        stamped = x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamps(signed))
        certificate = builder.add_extension(stamped, critical=False).sign(self.authority, hashes.SHA256())
        chain = [one.public_bytes(serialization.Encoding.PEM).decode() for one in (certificate, self.root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}

    def append(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the entry of the log for what `request` proposes."""
        content = request["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        body = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": _hash(content["envelope"].encode()),
                "payloadHash": _hash(base64.b64decode(envelope["payload"])),
                "signatures": [{"signature": envelope["signatures"][0]["sig"], "verifier": content["verifiers"][0]}],
            },
        }
        self.entries.append(body)
        leaf = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        root, log_id = hashlib.sha256(b"\0" + leaf).digest(), _key_id(self.log)
        note = f"log\n1\n{base64.b64encode(root).decode()}\n"
        signature = base64.b64encode(log_id[:4] + _sign(self.log, note.encode())).decode()
        entry = {
            "body": base64.b64encode(leaf).decode(),
            "integratedTime": int(time.time()),
            "logID": log_id.hex(),
            "logIndex": 0,
        }
        promise = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        proof = {
            "logIndex": 0,
            "treeSize": 1,
            "rootHash": root.hex(),
            "hashes": [],
            "checkpoint": f"{note}\n\N{EM DASH} log {signature}\n",
        }
        promised = base64.b64encode(_sign(self.log, promise)).decode()
        return {"0": {**entry, "verification": {"inclusionProof": proof, "signedEntryTimestamp": promised}}}

    def trust(self, url: str) -> dict[str, Any]:
        """Return what clients of the services at `url` trust, as Sigstore's `ClientTrustConfig`."""
        valid = {"start": "2020-01-01T00:00:00Z"}
        service = {"url": url, "majorApiVersion": 1, "validFor": valid, "operator": "local"}
        authority = base64.b64encode(self.root.public_bytes(serialization.Encoding.DER)).decode()
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": [service],
                "oidcUrls": [service],
                "rekorTlogUrls": [service],
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaConfig": {"selector": "ANY"},
            },
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [_log(url, self.log, valid)],
                "ctlogs": [_log(url, self.certificate_log, valid)],
                "certificateAuthorities": [
                    {
                        "subject": {"organization": "local", "commonName": "authority"},
                        "uri": url,
                        "certChain": {"certificates": [{"rawBytes": authority}]},
                        "validFor": valid,
                    }
                ],
            },
        }

    def _certificate(self, name: str, key: ec.EllipticCurvePublicKey, *, is_authority: bool) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(
            digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, **_NO_USAGES
        )
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if is_authority else []))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(minutes=10))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )

    def _timestamps(self, certificate: bytes) -> bytes:
        """Return the list of one timestamp (RFC 6962, 3.2 and 3.3), which the certificate of a log is about."""
        now = int(time.time()) * 1000
        entry = _key_id(self.authority) + struct.pack("!I", len(certificate))[1:] + certificate
        signed = struct.pack("!BBQH", 0, 0, now, 1) + entry + struct.pack("!H", 0)
        signature = _sign(self.certificate_log, signed)
        # The first byte of each pair: SHA-256 and ECDSA.
        stamp = struct.pack("!B32sQHBBH", 0, _key_id(self.certificate_log), now, 0, 4, 3, len(signature)) + signature
        listed = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        return b"\x04" + bytes([len(listed)] if len(listed) < 128 else [0x81, len(listed)]) + listed


@contextmanager
def sigstore(place: Path) -> Iterator[Sigstore]:
    """Serve a Sigstore until the block ends; `trust.json` in `place` is what its clients trust."""
    services = Sigstore()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"authorization_endpoint": f"{url}/authorize", "token_endpoint": f"{url}/token"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/v2/signingCert":
                self._answer(services.certify(request, self.headers["Authorization"]))
            else:
                assert self.path == "/api/v1/log/entries", self.path
                self._answer(services.append(request), 201)

        def _answer(self, content: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        (place / "trust.json").write_text(json.dumps(services.trust(url)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield services
        finally:
            server.shutdown()


def token(subject: str) -> str:
    """Return a token of the provider for `subject`, whose signature only the authority would look at."""
    now = int(time.time())
    claims = {"iss": ISSUER, "sub": subject, "aud": "sigstore", "iat": now, "exp": now + 600}
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def _unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _hash(data: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}


def _public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def _key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_public_bytes(key)).digest()


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _log(url: str, key: ec.EllipticCurvePrivateKey, valid: dict[str, str]) -> dict[str, Any]:
    public = base64.b64encode(_public_bytes(key)).decode()
    return {
        "baseUrl": url,
        "hashAlgorithm": "SHA2_256",
        "publicKey": {"rawBytes": public, "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": valid},
        "logId": {"keyId": base64.b64encode(_key_id(key)).decode()},
    }
