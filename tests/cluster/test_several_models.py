"""A configuration file with a list of models."""

import pytest

from cluster.config import ServeConfig
from cluster.several_models import application_name, read_models
from specdec.errors import InvalidValueError


@pytest.fixture
def read(tmp_path):
    """Reads a file of this text."""

    def read(text, **overrides):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return read_models(path, overrides)

    return read


def test_without_a_list_there_is_one(read):
    assert read("model: tiny\nmax_num_seqs: 8\n") == (ServeConfig(model="tiny", max_num_seqs=8),)


def test_each_has_what_all_have_and_what_it_says_itself(read):
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: []", "a list of mappings"),
        ("models: {model: a}", "a list of mappings"),
        ("models: [a, b]", "a list of mappings"),
        ("models: [{models: []}]", "a list of mappings"),
        ("model: a\nmodels: [{model: b}]", "model is 'a'; it must be left out beside models"),
        ("served_model_name: a\nmodels: [{model: b}]", "left out beside models"),
        ("models: [{model: a}, {model: b}]", "serve for several models"),
        ("ingress: serve\nmodels: [{model: x/a}, {model: y/a}]", "another one than 'a'"),
        ("ingress: serve\nmodels: [{model: x/a.b}, {model: x/A_B}]", "another one than 'a.b'"),
        ("models: [{model: a, http_port: 1}]", "left out of models"),
        ("models: [{model: a, ray_address: auto}]", "left out of models"),
        ("models: [{modle: a}]", "did you mean model"),
    ],
)
def test_what_is_wrong_with_a_list_is_told(read, text, told):
    with pytest.raises(InvalidValueError, match=told):
        read(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("org/Model_v1.5", "org-model-v1-5"),
        ("日本", "model"),
        ("x" * 62 + "-yz", "x" * 62),
    ],
)
def test_an_application_is_named_by_a_dns_label(name, expected):
    assert application_name(ServeConfig(served_model_name=name)) == expected
