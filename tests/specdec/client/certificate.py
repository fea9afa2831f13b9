"""Self-signed TLS certificates for tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def self_signed_certificate(host_name: str = "") -> tuple[bytes, bytes]:
    """Return a private key and a certificate in PEM, for 127.0.0.1 without a host name."""
    subject: x509.GeneralName = x509.IPAddress(ip_address("127.0.0.1"))
    if host_name:
        subject = x509.DNSName(host_name)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    return (
        key.private_bytes(pem, private, serialization.NoEncryption()),
        certificate.public_bytes(pem),
    )


@contextmanager
def piped(content: bytes) -> Iterator[Path]:
    """Yield the path of a pipe, which can be read once."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    yield Path(f"/dev/fd/{reader}")
    os.close(reader)
