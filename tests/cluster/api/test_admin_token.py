"""The operators' token."""

import pytest

from cluster.api.admin_token import AdminAccess, read_token
from specdec.types.errors import InvalidValueError, UnauthenticatedError

TOKEN = "correct-horse-battery"


def test_without_a_token_every_call_is_accepted():
    AdminAccess().check(None)


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_a_call_with_the_token_is_accepted(header):
    AdminAccess(TOKEN).check(header)


@pytest.mark.parametrize(
    "header",
    [None, "", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN}x", "Bearer é"],
)
def test_a_call_without_the_token_is_rejected(header):
    with pytest.raises(UnauthenticatedError) as caught:
        AdminAccess(TOKEN).check(header)
    assert TOKEN not in str(caught.value) + repr(caught.value)


def test_repr_does_not_contain_the_token():
    assert TOKEN not in repr(AdminAccess(TOKEN))


def test_a_file_takes_precedence_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_ADMIN_TOKEN", raising=False)
    assert read_token("admin_token_file", None) is None
    monkeypatch.setenv("SPECDEC_ADMIN_TOKEN", "x" * 16)
    assert read_token("admin_token_file", None) == "x" * 16
    path = tmp_path / "token"
    path.write_text(f" {TOKEN}\n")
    assert read_token("admin_token_file", path) == TOKEN


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "with a space in it " * 3, "é" * 20])
def test_an_invalid_token_is_not_quoted(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match="16 printable ASCII characters") as caught:
        read_token("admin_token_file", path)
    assert caught.value.field == "admin_token_file"
    assert not text or text not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(InvalidValueError, match="a readable file"):
        read_token("token_file", tmp_path / "none")
