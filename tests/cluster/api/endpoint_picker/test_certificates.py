"""Certificates that are read again when their files change."""

import errno
from unittest.mock import Mock

import pytest

from cluster.api.endpoint_picker import certificates
from specdec.types.errors import InvalidValueError


@pytest.mark.parametrize("fault", ["mismatch", "missing"])
def test_files_that_cannot_be_used_are_checked_and_logged_once(
    tmp_path, monkeypatch, caplog, fault
):
    key_file, certificate_file = tmp_path / "key", tmp_path / "certificate"

    def write(key, certificate):
        key_file.write_bytes(key)
        certificate_file.write_bytes(certificate)

    write(*certificates.self_signed())
    reader = certificates._PairReader(key_file, certificate_file)
    reader.read()
    check = Mock(wraps=certificates.check_certificate)
    monkeypatch.setattr(certificates, "check_certificate", check)
    key, certificate = certificates.self_signed()
    for _ in range(2):
        caplog.clear()
        key_file.write_bytes(key) if fault == "mismatch" else key_file.unlink()
        for _ in range(3):
            assert reader.read_if_changed() is None
        [record] = caplog.records
        assert "the certificate is not read again" in record.message
        write(key, certificate)
        assert reader.read_if_changed() is not None
        key, certificate = certificates.self_signed()
    assert check.call_count == (4 if fault == "mismatch" else 2)


def test_a_good_certificate_is_read_after_a_fault_that_passes(tmp_path, monkeypatch):
    key_file, certificate_file = tmp_path / "key", tmp_path / "certificate"
    reader = certificates._PairReader(key_file, certificate_file)
    key_file.write_bytes((pair := certificates.self_signed())[0])
    certificate_file.write_bytes(pair[1])
    fault = InvalidValueError("tls_cert_file", str(certificate_file), "readable")
    fault.__cause__ = OSError(errno.EMFILE, "too many open files")
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "check_certificate", Mock(side_effect=fault))
        assert reader.read_if_changed() is None
    assert reader.read_if_changed() is not None
