"""Defaults that depend on the device."""

import pytest

from specdec.config.llm import LLMConfig


@pytest.mark.parametrize(
    ("device", "defaults"), [("cpu", ("float32", 64, 256)), ("cuda", ("auto", 256, 2048))]
)
def test_a_device_has_its_own_defaults(device, defaults):
    config = LLMConfig(model="tiny", device=device)
    assert (config.dtype, config.max_num_seqs, config.max_num_batched_tokens) == defaults
    assert LLMConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_given_values_are_kept(device):
    given = {"dtype": "float16", "max_num_seqs": 3, "max_num_batched_tokens": 77}
    config = LLMConfig(model="tiny", device=device, **given)
    assert {name: getattr(config, name) for name in given} == given
