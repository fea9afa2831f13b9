"""The operators' token."""

import pytest

from cluster.api.admin_token import AdminAccess, read_token
from specdec.types.errors import InvalidValueError, UnauthenticatedError

TOKEN = "correct-horse-battery"


def test_without_a_token_everyone_may():
    AdminAccess().check(None)


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_with_the_token(header):
    AdminAccess(TOKEN).check(header)


@pytest.mark.parametrize(
    "header",
    [None, "", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN}x", "Bearer é"],
)
def test_without_it(header):
    with pytest.raises(UnauthenticatedError) as caught:
        AdminAccess(TOKEN).check(header)
    assert TOKEN not in str(caught.value) + repr(caught.value)


def test_nothing_that_is_printed_tells_it():
    assert TOKEN not in repr(AdminAccess(TOKEN))


def test_a_file_goes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_ADMIN_TOKEN", raising=False)
    assert read_token("admin_token_file", None) is None
    monkeypatch.setenv("SPECDEC_ADMIN_TOKEN", "x" * 16)
    assert read_token("admin_token_file", None) == "x" * 16
    path = tmp_path / "token"
    path.write_text(f" {TOKEN}\n")
    assert read_token("admin_token_file", path) == TOKEN


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "with a space in it " * 3, "é" * 20])
def test_a_token_that_cannot_be_is_not_quoted(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match="16 printable ASCII characters") as caught:
        read_token("admin_token_file", path)
    assert caught.value.field == "admin_token_file"
    assert not text or text not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidValueError, match="that can be read"):
        read_token("token_file", tmp_path / "none")
