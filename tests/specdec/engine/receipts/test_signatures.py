"""Keys of receipts: files, signatures, and nothing that shows the private key."""

import stat
from pathlib import Path

import pytest

from specdec.engine.receipts.signatures import SigningKey, is_signed
from specdec.types.errors import InvalidValueError
from specdec.types.reports.receipts import Receipt


def test_a_key_is_read_from_the_file_that_it_was_written_to(tmp_path: Path):
    path, key = tmp_path / "key.pem", SigningKey.generate()
    key.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = SigningKey.read(path)
    assert read.public_key == key.public_key
    assert is_signed(Receipt("statement", read.sign("statement"), key.public_key))
    assert not is_signed(Receipt("another", read.sign("statement"), key.public_key))
    assert repr(read) == f"SigningKey({key.public_key})"
    with pytest.raises(InvalidValueError, match=r"receipt_key_file .* a new file"):
        key.write(path)


def test_other_files_are_rejected(tmp_path: Path):
    path = tmp_path / "key.pem"
    for content in ("", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        path.write_text(content)
        with pytest.raises(InvalidValueError, match="an Ed25519 private key in PEM"):
            SigningKey.read(path)
