"""Adapters that a service loads when it starts."""

import json

import pytest

from cluster.config.config_file import read_models
from cluster.config.lora_modules import canonical_lora_modules, read_lora_modules
from cluster.config.serve_config import ServeConfig
from specdec.config.engine import AdapterLimits
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import InvalidValueError

BAD_DRAFT = {"name": "a", "path": "b", "draft_path": 3}
ORDERS = (AdapterOrder.load("sql", "org/sql"), AdapterOrder.load("chat", "org/chat@v1"))


@pytest.mark.parametrize(
    "value",
    [
        "sql=org/sql,chat=org/chat@v1",
        " sql=org/sql , chat=org/chat@v1 ",
        '{"name": "sql", "path": "org/sql"}, {"name": "chat", "path": "org/chat@v1"}',
        '[{"name": "sql", "path": "org/sql", "base_model_name": "m"}, "chat=org/chat@v1"]',
        ["sql=org/sql", {"name": "chat", "path": "org/chat@v1"}],
        {"sql": "org/sql", "chat": "org/chat@v1"},
    ],
)
def test_forms(value):
    assert read_lora_modules(value) == ORDERS
    assert read_lora_modules(canonical_lora_modules(value)) == ORDERS


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "sql", "path": "org/sql", "draft_path": "org/draft"}',
        [{"name": "sql", "path": "org/sql", "draft_path": "org/draft"}],
    ],
)
def test_a_counterpart_for_the_drafter(value):
    orders = (AdapterOrder.load("sql", "org/sql", draft_path="org/draft"),)
    assert read_lora_modules(value) == orders
    assert read_lora_modules(canonical_lora_modules(value)) == orders


def test_a_counterpart_alone():
    orders = (AdapterOrder.load("fast", draft_path="org/draft"),)
    value = '{"name": "fast", "draft_path": "org/draft"}'
    assert read_lora_modules(value) == orders
    assert read_lora_modules(canonical_lora_modules(value)) == orders


@pytest.mark.parametrize(
    "value",
    [
        "sql",
        "=x",
        "sql=",
        "sql=a,sql=b",
        '{"name": "sql"}',
        '{"name": "sql", "path": "a", "path": "b"}',
        "{",
        3,
        [3],
        {"sql": 3},
        "a b=c",
        [BAD_DRAFT],
    ],
)
def test_refused_values(value):
    with pytest.raises(InvalidValueError):
        read_lora_modules(value)
    with pytest.raises(InvalidValueError):
        ServeConfig.from_sources({"enable_lora": True, "lora_modules": value})


def test_an_existing_path_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    config = ServeConfig.from_sources({"enable_lora": True, "lora_modules": "sql=sql"})
    again = ServeConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
    monkeypatch.chdir("/")
    assert again == config
    assert again.startup_adapters == (AdapterOrder.load("sql", str(tmp_path / "sql")),)


def test_a_file_lists_adapters(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("enable_lora: true\nlora_modules:\n  sql: org/sql\n  chat: org/chat@v1\n")
    [config] = read_models(path)
    assert config.startup_adapters == ORDERS


def test_limits_follow_from_the_settings():
    def limits(**settings):
        return ServeConfig.from_sources({"enable_lora": True, **settings}).adapter_limits

    assert ServeConfig().adapter_limits is None
    assert limits() == AdapterLimits(1, 16, 8)
    assert limits(max_loras=12, max_lora_rank=64) == AdapterLimits(12, 64, 12)
    many = {f"a{i}": "org/a" for i in range(9)}
    assert limits(lora_modules=many) == AdapterLimits(1, 16, 9)
    assert limits(max_cpu_loras=3) == AdapterLimits(1, 16, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_modules": "sql=a"}, "left out unless enable_lora is given"),
        ({"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2}, r"at least max_loras \(3\)"),
        (
            {"enable_lora": True, "max_cpu_loras": 1, "lora_modules": "a=x,b=y"},
            "at least 2, the number of lora_modules",
        ),
        (
            {"enable_lora": True, "served_model_name": "a", "lora_modules": "a=x"},
            "without an adapter that has the name of the model",
        ),
        ({"enable_lora": True, "max_lora_rank": 513}, "from 1 to 512"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(InvalidValueError, match=message):
        ServeConfig.from_sources(settings)
