"""API keys and the operators' token: their sources, authentication and limits."""

import gc
import weakref

import pytest
import yaml

from cluster.api.base.authentication import (
    AdminAccess,
    ApiKey,
    ApiKeys,
    NoApiKeyError,
    access_summary,
    read_keys,
    read_token,
    samples_warning,
)
from cluster.config.secrets import KEYS_VARIABLE
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import InvalidValueError, OverloadedError, UnauthenticatedError
from tests.clock import Clock

KEY, OTHER = "sk-correct-horse", "sk-battery-staple"


def bearer(key):
    return f"Bearer {key}"


def refused(keys, authorization):
    with pytest.raises((NoApiKeyError, OverloadedError)) as caught:
        keys.admit(authorization)
    return caught.value


def test_without_keys_every_call_is_accepted():
    ApiKeys().admit(None).release()
    ApiKeys().check(None)


@pytest.mark.parametrize(
    "authorization",
    [None, "", KEY, "Basic " + KEY, "Bearer", "Bearer ", bearer("sk-wrong-one"), bearer("é")],
)
def test_a_call_without_a_known_key_is_rejected(authorization):
    keys = ApiKeys([ApiKey("ann", KEY)])
    error = refused(keys, authorization)
    assert type(error) is NoApiKeyError
    with pytest.raises(NoApiKeyError):
        keys.check(authorization)


@pytest.mark.parametrize("authorization", [bearer(KEY), f"bearer  {KEY} "])
def test_each_key_is_accepted(authorization):
    keys = ApiKeys([ApiKey("bob", OTHER), ApiKey("ann", KEY)])
    keys.admit(authorization)
    keys.check(authorization)


def test_concurrency_limit():
    keys = ApiKeys([ApiKey("ann", KEY, max_concurrent_requests=2), ApiKey("bob", OTHER)])
    first, second = (keys.admit(bearer(KEY)) for _ in range(2))
    error = refused(keys, bearer(KEY))
    assert (type(error), error.retry_after_s) == (OverloadedError, None)
    keys.admit(bearer(OTHER))
    first.release()
    first.release()  # a second release frees no second slot
    keys.admit(bearer(KEY))
    refused(keys, bearer(KEY))
    second.release()
    keys.admit(bearer(KEY))


def test_rate_limit():
    clock = Clock()
    keys = ApiKeys([ApiKey("ann", KEY, requests_per_s=0.5)], clock)
    keys.admit(bearer(KEY))
    error = refused(keys, bearer(KEY))
    assert (type(error), error.retry_after_s) == (OverloadedError, 2)
    clock.now_s += 1.9
    refused(keys, bearer(KEY))
    clock.now_s += 0.2
    keys.admit(bearer(KEY))
    refused(keys, bearer(KEY))


def test_one_second_of_requests_may_arrive_as_a_burst():
    clock = Clock()
    keys = ApiKeys([ApiKey("ann", KEY, requests_per_s=3)], clock)
    clock.now_s += 1000
    for _ in range(3):
        keys.admit(bearer(KEY))
    assert refused(keys, bearer(KEY)).retry_after_s == 1


def test_keys_from_a_file(tmp_path):
    path = tmp_path / "keys.yaml"
    entries = [
        {"name": "ann", "key": KEY, "requests_per_s": 2, "max_concurrent_requests": 4},
        {"name": "bob", "key": OTHER},
    ]
    path.write_text(yaml.safe_dump(entries))
    assert read_keys("api_key_file", path) == (
        ApiKey("ann", KEY, 2, 4),
        ApiKey("bob", OTHER),
    )


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, f"{KEY}, {OTHER}\n")
    assert [each.key for each in read_keys("api_key_file", None)] == [KEY, OTHER]
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_keys("api_key_file", None) == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        f"name: ann\nkey: {KEY}",
        f"- {KEY}",
        f"- {KEY}: ann",
        f"- {{name: ann, key: {KEY}, rate: 1}}",
        f"- {{name: ann, key: {KEY}, requests_per_s: 0}}",
        f"- {{name: ann, key: {KEY}, requests_per_s: .nan}}",
        f"- {{name: ann, key: {KEY}, max_concurrent_requests: 1.5}}",
        f"- {{name: ann, key: {KEY}, min_priority: -1001}}",
        f"- {{name: ann, key: {KEY}, min_priority: 1}}",
        f"- {{name: ann, key: {KEY}, min_priority: true}}",
        f"- {{name: ann, key: {KEY}}}\n- {{name: bob, key: {KEY}}}",
        f"- {{name: ann, key: {KEY}}}\n- {{name: ann, key: {OTHER}}}",
        "- {name: ann, key: short}",
        "- {name: ann, key: with a space}",
        "- {name: ann}",
        f"- {{key: {KEY}}}",
        f"- {{name: ann, key: !!bool {KEY}}}",
        f"- {{name: ann, key: {KEY}, requests_per_s: {'[' * 3000}",
    ],
    ids=lambda content: content[:30],
)
def test_errors_of_a_file_do_not_quote_its_keys(tmp_path, content):
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(InvalidValueError) as caught:
        read_keys("api_key_file", path)
    for secret in (KEY, OTHER, "short", "with a space"):
        assert secret not in str(caught.value)


def test_no_key_is_ever_shown():
    assert KEY not in repr(ApiKeys([ApiKey("ann", KEY)])) + repr(ApiKey("ann", KEY))


def test_only_digests_of_keys_are_kept():
    key = ApiKey("ann", KEY)
    keys, reference = ApiKeys([key]), weakref.ref(key)
    del key
    gc.collect()
    assert reference() is None
    keys.check(bearer(KEY))


def test_an_undone_lease_takes_neither_slot_nor_rate():
    limits = {"max_concurrent_requests": 1, "requests_per_s": 1.0}
    keys = ApiKeys([ApiKey("ann", KEY, **limits)], Clock())
    for _ in range(3):
        lease = keys.admit(bearer(KEY))
        lease.undo()
        lease.undo()  # a second undo refunds no second request
        lease.release()
    keys.admit(bearer(KEY)).release()
    refused(keys, bearer(KEY))


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


@pytest.mark.parametrize(
    ("key", "low"), [(ApiKey("ann", KEY), 0), (ApiKey("ann", KEY, min_priority=-100), -100)]
)
def test_the_priority_is_limited_by_key(key, low):
    keys = ApiKeys([key], min_priority=-1000)
    for priority in (low, 0, 1000):
        keys.check_priority(bearer(KEY), priority)
    for priority in (low - 1, 1001):
        limit = f"priority is {priority}; it must be from {low} to 1000 with this API key"
        with pytest.raises(InvalidValueError, match=limit):
            keys.check_priority(bearer(KEY), priority)
    with pytest.raises(NoApiKeyError):
        keys.check_priority(None, 0)


def test_without_keys_the_priority_is_limited_by_the_service():
    ApiKeys().check_priority(None, -10)
    with pytest.raises(InvalidValueError, match="from -10 to 1000 without an API key"):
        ApiKeys().check_priority(None, -11)
    ApiKeys(min_priority=-50).check_priority(None, -50)


def test_without_a_token_an_api_key_is_the_credential():
    access = AdminAccess(None, ApiKeys([ApiKey("ann", KEY)]))
    access.check(bearer(KEY))
    for header in (None, bearer(OTHER), bearer("")):
        with pytest.raises(NoApiKeyError):
            access.check(header)
        with pytest.raises(NoApiKeyError):
            access.admit(header)


def test_with_a_token_an_api_key_is_none():
    access = AdminAccess(TOKEN, ApiKeys([ApiKey("ann", KEY)]))
    access.check(bearer(TOKEN))
    with pytest.raises(UnauthenticatedError):
        access.check(bearer(KEY))


def test_a_key_that_generates_has_its_limits():
    keys = ApiKeys([ApiKey("ann", KEY, max_concurrent_requests=1)])
    access = AdminAccess(None, keys)
    lease = access.admit(bearer(KEY))
    with pytest.raises(OverloadedError):
        access.admit(bearer(KEY))
    access.check(bearer(KEY))
    lease.release()
    access.admit(bearer(KEY)).release()


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("has_keys", [False, True])
def test_the_summary_of_access_matches_what_is_checked(has_token, has_keys):
    keys = ApiKeys([ApiKey("ann", KEY)] if has_keys else [])
    access = AdminAccess(TOKEN if has_token else None, keys)
    summary = access_summary(has_token, has_keys)
    assert ("every client may generate" in summary) is keys.is_open
    assert ("and change settings" in summary) is access.is_open
    assert ("admin token" in summary) is has_token


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


@pytest.mark.parametrize(
    ("settings", "credentials", "is_open"),
    [
        ({"host": "0.0.0.0"}, (False, False), True),
        ({"ingress": "serve"}, (False, False), True),
        ({"host": "127.0.0.1"}, (False, False), False),
        ({"host": "0.0.0.0"}, (True, False), False),
        ({"host": "0.0.0.0"}, (False, True), False),
        ({"host": "0.0.0.0", "training_buffer_tokens": 0}, (False, False), False),
    ],
)
def test_answers_that_any_client_can_take_need_a_warning(settings, credentials, is_open):
    config = ServeConfig(**{"training_buffer_tokens": 1000, **settings})
    warning = samples_warning(config, *credentials)
    assert (warning is not None) == is_open
    assert not is_open or "set an admin token or API keys" in warning
