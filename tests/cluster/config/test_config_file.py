"""Configuration files: valid and invalid ones, and those that list several models."""

from types import SimpleNamespace

import pytest

from cluster.api.http_app import make_app
from cluster.config.config_file import (
    PATHS_OF_THE_SERVICE,
    application_name,
    check_prefix,
    read_config_file,
    read_models,
)
from cluster.config.serve_config import ServeConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError


def test_keys_and_values_are_not_changed(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: tiny\nunknown: {deep: [1, 2.5, null]}\n")
    assert read_config_file(path) == {"model": "tiny", "unknown": {"deep": [1, 2.5, None]}}


def test_a_mapping_overrides_what_is_merged_into_it(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, x: 4, '1': 5, 1: 6}\n"
        "d: {<<: *a, <<: {z: 7}}\n"
    )
    b, c = {"x": 1, "y": 3}, {"x": 4, "y": 3, "1": 5, 1: 6}
    d = {"x": 1, "y": 2, "z": 7}
    assert read_config_file(path) == {"a": {"x": 1, "y": 2}, "b": b, "c": c, "d": d}


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    path = tmp_path / "serve.yaml"
    path.touch()
    assert read_config_file(path) == {}


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"- 1\n", "a YAML mapping of settings"),
        (b"model: [\n", "a readable YAML file"),
        (b"model: \xff\n", "a readable YAML file"),
        (b"model: !!python/name:os.system\n", "a readable YAML file"),
        (b"model: " + b"[" * 3000, "a readable YAML file"),
        (b"model: " + b"9" * 5000, "a readable YAML file"),
        (b"model: 2026-99-99\n", "a readable YAML file"),
        (b"model: !!bool maybe\n", "a readable YAML file"),
        (b"model: !!int ''\n", "a readable YAML file"),
        (b"model: !!timestamp now\n", "a readable YAML file"),
        (b"model: {!!map x: 1}\n", "a readable YAML file"),
        (b"model: a\nmax_num_seqs: 8\nmax_num_seqs: 16\n", "a readable YAML file (found the key"),
        (b"model: a\nspeculative_config: {method: a, method: b}\n", "a readable YAML file"),
        (b"model: a\ntrue: 1\nTrue: 2\n", "a readable YAML file (found the key 'True' twice"),
        (b"model: a\n0x10: 1\n16: 2\n", "a readable YAML file (found the key"),
        (None, "a readable YAML file"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_an_invalid_file(tmp_path, content, limit):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValueError) as caught:
        read_config_file(path)
    assert caught.value.field == "configuration file"
    assert caught.value.limit.startswith(limit)
    assert "\n" not in str(caught.value)


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a configuration file and reads it."""

    def read(text, **overrides):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return read_models(path, overrides)

    return read


def test_a_file_without_a_list_is_one_model(read):
    assert read("model: tiny\nmax_num_seqs: 8\n") == (ServeConfig(model="tiny", max_num_seqs=8),)


def test_hosts_are_a_list_or_a_text_for_the_whole_service(read):
    for text in (
        "allowed_hosts: [llm.example.com, '*.lan']",
        "allowed_hosts: llm.example.com,*.lan",
    ):
        [config] = read(f"model: tiny\n{text}\n")
        assert config.allowed_hosts == "llm.example.com,*.lan"
    with pytest.raises(InvalidValueError, match="applies to the whole service"):
        read("models: [{model: a, allowed_hosts: '*'}]\n")


def test_settings_of_a_model_override_the_common_ones(read):
    text = """
ingress: serve
drain_timeout_s: 30
block_size: 8
models:
  - model: org/big
    served_model_name: big
    block_size: 32
  - model: org/small
"""
    big, small = read(text, max_num_seqs=4)
    assert (big.served_model_name, small.served_model_name) == ("big", "small")
    assert (big.block_size, small.block_size) == (32, 8)
    for each in (big, small):
        assert (each.drain_timeout_s, each.max_num_seqs, each.ingress) == (30, 4, "serve")


def test_names_of_vllm_are_accepted_everywhere(read):
    text = """
ingress: serve
port: 8800
models:
  - {model: org/big, dtype: half, num_speculative_tokens: 5}
  - model: org/small
"""
    big, small = read(text, speculative_config={"method": "ngram"})
    assert (big.dtype, small.dtype) == ("float16", "float32")
    assert big.http_port == small.http_port == 8800
    assert big.speculative_config == SpeculativeConfig.of("ngram", num_speculative_tokens=5)
    assert small.speculative_config == SpeculativeConfig.of("ngram")


def test_a_mapping_in_place_of_a_model(read):
    with pytest.raises(InvalidValueError) as caught:
        read("model: {small: true}")
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "a list of mappings"),
        ("models: {model: a}", "a list of mappings"),
        ("models: [a, b]", "a list of mappings"),
        ("models: [{models: []}]", "a list of mappings"),
        ("model: a\nmodels: [{model: b}]", "model is 'a'; it must be left out beside models"),
        ("served_model_name: a\nmodels: [{model: b}]", "left out beside models"),
        ("models: [{model: a}, {model: b}]", "serve for several models"),
        ("ingress: serve\nmodels: [{model: x/a}, {model: y/a}]", "different from 'a' in"),
        ("ingress: serve\nmodels: [{model: x/a.b}, {model: x/A_B}]", "different from 'a.b' in"),
        ("ingress: serve\nmodels: [{model: a}, {model: x/V1}]", "/v1 is an API path"),
        ("models: [{model: a, http_port: 1}]", "left out of models"),
        ("models: [{model: a, port: 1}]", "port is 1; it must be left out of models"),
        ("models: [{model: a, max-logprobs: 1}]", "max_logprobs"),
        ("models: [{model: a, ray_address: auto}]", "left out of models"),
        ("models: [{modle: a}]", "did you mean model"),
        ("max-num-seqs: 8\nmax_num_seqs: 16", "left out where max_num_seqs is given, too"),
        ("models: [{model: a, max-num-seqs: 8, max_num_seqs: 16}]", "left out where max_num_seqs"),
        ('hf_overrides: \'{"rope_theta": 1e6, "rope_theta": 2e6}\'', "a JSON object such as"),
        (
            'speculative_config: \'{"method": "ngram", "method": "suffix"}\'',
            "a name occurs twice",
        ),
    ],
)
def test_an_invalid_list_of_models(read, text, message):
    with pytest.raises(InvalidValueError, match=message):
        read(text)


def paths_of(routes):
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route.path] if included is None else paths_of(included.routes)


def test_no_api_path_can_be_the_prefix_of_a_model():
    app = make_app(lambda: SimpleNamespace(), lambda: SimpleNamespace())
    paths = set(paths_of(app.routes))
    assert {"/v1/models", "/ready", "/openapi.json"} <= paths
    assert {path.split("/")[1] for path in paths} - {""} == PATHS_OF_THE_SERVICE


def test_the_first_model_may_have_any_name(read):
    first, _ = read("ingress: serve\nmodels: [{model: x/v1}, {model: b}]")
    assert first.served_model_name == "v1"
    with pytest.raises(InvalidValueError, match="a different name: /v1 is"):
        check_prefix(first)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("org/Model_v1.5", "org-model-v1-5"),
        ("日本", "model"),
        ("x" * 62 + "-yz", "x" * 62),
    ],
)
def test_application_names_are_dns_labels(name, expected):
    assert application_name(ServeConfig(served_model_name=name)) == expected
