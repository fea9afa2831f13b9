"""Ed25519 keys that sign receipts, and the verification of signatures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from specdec.types.errors import InvalidValueError
from specdec.types.reports.receipts import SIGNATURE_DOMAIN, Receipt

_KEY_HELP = "an Ed25519 private key in PEM without a password; specdec receipt-key makes one"
_MAX_KEY_BYTES = 4096


class SigningKey:
    """A private key. It is never part of a message, a log line or a representation."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"SigningKey({self.public_key})"

    @classmethod
    def generate(cls) -> Self:
        """Make a random key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of `write`. Raises InvalidValueError."""
        try:
            with path.open("rb") as file:
                key = serialization.load_pem_private_key(file.read(_MAX_KEY_BYTES), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidValueError("receipt_key_file", str(path), _KEY_HELP) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidValueError("receipt_key_file", str(path), _KEY_HELP)
        return cls(key)

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read. Raises InvalidValueError."""
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        content = self._key.private_bytes(serialization.Encoding.PEM, *form)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            limit = f"the path of a new file ({error.strerror})"
            raise InvalidValueError("receipt_key_file", str(path), limit) from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def sign(self, statement: str) -> str:
        """Return the signature of a statement's text, as hexadecimal digits."""
        return self._key.sign(SIGNATURE_DOMAIN + statement.encode()).hex()


def is_signed(receipt: Receipt) -> bool:
    """Return whether the signature of a receipt is that of its public key."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt.public_key))
        signed = SIGNATURE_DOMAIN + receipt.statement.encode()
        key.verify(bytes.fromhex(receipt.signature), signed)
    except (ValueError, InvalidSignature):
        return False
    return True
