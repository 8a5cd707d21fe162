"""Mutual TLS of everybody who has the same key file: both ends show one certificate, and accept no other."""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from functools import cache
from pathlib import Path

from ....base.errors import cannot, check_package, refuse

#: The name in the certificate, instead of a host's.
NAME = "megatron-lossy"
#: Bytes of a key file, at least.
_LEAST = 16


def read_key(path: str, flag: str = "--key-file") -> bytes:
    """Return the bytes of the key file. Raises :class:`UsageError` about ``flag`` if it cannot be read, or is too short."""
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise cannot(flag, path, "read", error) from None
    if len(key) < _LEAST:
        raise refuse(flag, path, f"has {len(key)} bytes, and a secret needs {_LEAST} at least")
    return key


def client_context(key: bytes) -> ssl.SSLContext:
    """Return the context of a client. ``key``: the bytes of the key file."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, key)


def server_context(key: bytes) -> ssl.SSLContext:
    """Return the context of a server."""
    return _context(ssl.PROTOCOL_TLS_SERVER, key)


def _context(protocol: int, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    private, certificate = _certificate(key)
    context.load_verify_locations(cadata=certificate)
    with tempfile.NamedTemporaryFile() as file:  # the library reads files only; this one is its owner's alone, mode 600
        file.write((private + certificate).encode())
        file.flush()
        context.load_cert_chain(file.name)
    return context


@cache
def _certificate(key: bytes) -> tuple[str, str]:
    """The private key and its certificate, as PEM: the same bytes wherever the key file is the same."""
    check_package("cryptography", "--key-file", "FILE", "'megatron-lossy[elastic]'")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"megatron-lossy tls 1" + key).digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))  # a clock that is wrong must not end a run
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, None)
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return private.private_bytes(pem, *form).decode(), certificate.public_bytes(pem).decode()
