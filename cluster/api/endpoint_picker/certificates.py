"""Certificates of the picker: self-signed ones, and files that are read again when they change."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cluster.config.network import check_certificate
from specdec.types.errors import InvalidValueError

logger = logging.getLogger(__name__)

_VALID = timedelta(days=3650)
_NAMES = (x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1")))
_CLOCK_SKEW = timedelta(minutes=5)


def self_signed() -> tuple[bytes, bytes]:
    """Return a new private key and its self-signed certificate, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "specdec-endpoint-picker")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(_NAMES), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def reloading_credentials(key_file: Path, certificate_file: Path) -> Any:
    """Return credentials of a gRPC server that follow their files, from the next connection on.

    Files that do not belong together, as while they are replaced, change nothing until they do.
    Raises OSError for files that cannot be read now.
    """
    reader = _PairReader(key_file, certificate_file)
    return grpc.dynamic_ssl_server_credentials(reader.read(), reader.read_if_changed)


class _PairReader:
    """Reads a key and its certificate; `read_if_changed` is called at each handshake."""

    def __init__(self, key_file: Path, certificate_file: Path) -> None:
        self._files = key_file, certificate_file
        self._pair = b"", b""
        self._refused: object = None  # files that were not read, or why they could not be

    def read(self) -> Any:
        """Return the configuration of a server with the present files. Raises OSError."""
        key_file, certificate_file = self._files
        return self._use(key_file.read_bytes(), certificate_file.read_bytes())

    def read_if_changed(self) -> Any:
        """Return the configuration with changed files, or None to keep the last one."""
        key_file, certificate_file = self._files
        present: tuple[bytes, ...] = ()
        try:
            present = key_file.read_bytes(), certificate_file.read_bytes()
            if present in (self._pair, self._refused):
                return None
            check_certificate(certificate_file, key_file)
        except (OSError, InvalidValueError) as error:
            is_final = isinstance(error.__cause__, ssl.SSLError)  # not as without descriptors
            refused = present if is_final else str(error)
            if refused != self._refused:
                logger.warning("the certificate is not read again: %s", error)
            self._refused = refused
            return None
        self._refused = None
        logger.info("the certificate is read again: %s", certificate_file)
        return self._use(*present)

    def _use(self, key: bytes, certificate: bytes) -> Any:
        self._pair = key, certificate
        return grpc.ssl_server_certificate_configuration([self._pair])
