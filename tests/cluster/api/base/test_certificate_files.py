"""Certificates that are read again when their files change."""

import errno
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives import serialization

from cluster.api.base import certificate_files
from cluster.api.base.certificate_files import _Files
from cluster.api.endpoint_picker.certificates import self_signed
from specdec.types.errors import InvalidValueError


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "key", tmp_path / "certificate"


def write(paths, pair):
    for path, data in zip(paths, pair, strict=True):
        path.write_bytes(data)


@pytest.fixture
def check(monkeypatch):
    check = Mock(wraps=certificate_files.check_certificate)
    monkeypatch.setattr(certificate_files, "check_certificate", check)
    return check


@pytest.mark.parametrize("fault", ["mismatch", "missing", "encrypted"])
def test_files_that_cannot_be_used_are_tried_and_logged_once(paths, check, caplog, fault):
    write(paths, self_signed())
    reader = _Files(*paths, lambda *pair: pair)
    reader.read()
    for _ in range(2):
        caplog.clear()
        pair = self_signed()
        if fault == "missing":
            paths[0].unlink()
        else:
            write(paths, (pair[0] if fault == "mismatch" else encrypted(pair[0]), self_signed()[1]))
        for _ in range(3):
            assert reader.read_if_changed() is None
        [record] = caplog.records
        assert "the certificate is not read again" in record.message
        assert (str(paths[0]) if fault == "missing" else "tls_cert_file is '") in record.message
        write(paths, pair)
        assert reader.read_if_changed() == pair
        assert reader.read_if_changed() is None
    assert check.call_count == (3 if fault == "missing" else 5)


def encrypted(key):
    private = serialization.load_pem_private_key(key, None)
    return private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


def test_a_good_certificate_is_read_after_a_fault_that_passes(paths, check):
    write(paths, self_signed())
    reader = _Files(*paths, lambda *_: "made")
    fault = InvalidValueError("tls_cert_file", str(paths[1]), "readable")
    fault.__cause__ = OSError(errno.EMFILE, "too many open files")
    check.side_effect = fault
    assert reader.read_if_changed() is None
    with pytest.raises(OSError, match="must be readable"):
        reader.read()
    check.side_effect = None
    assert reader.read_if_changed() == "made"
