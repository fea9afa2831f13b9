"""Checks of whole models on the CPU, where all must pass as well."""

import pytest
import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check, check_attention, check_model, measure
from benchmarks.tiny_model import write_tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_passes(tiny, dtype, monkeypatch):
    monkeypatch.setattr(checks, "_MAX_TOKENS", 16)  # `make gpu-check` has the whole length
    found = check_model(tiny, dtype, CPU)
    assert [check.name for check in found] == ["logits", "speculation"]
    assert all(check.passed for check in found), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_passes(dtype):
    assert check_attention(dtype, CPU).passed


def test_wrong_logits_do_not_pass(tiny, monkeypatch):
    right = checks._logits
    monkeypatch.setattr(checks, "_logits", lambda *arguments: right(*arguments) * 1.01)
    monkeypatch.setattr(checks, "_share_differing", lambda *arguments: 0.0)
    assert not check_model(tiny, "float32", CPU)[0].passed


def test_nan_does_not_pass():
    assert not Check("logits", "m", "float32", float("nan"), 1.0).passed


def test_steps_are_measured_with_the_memory_floor(tiny):
    steps = measure(tiny, "float32", CPU)
    layer = 288 * (15 * 32) + 9 * 32 * 288 + 3 * 288 * 512
    assert steps["weight_bytes"] == 4 * (4 * layer + 258 * 288)
    assert steps["floor_ms"] == pytest.approx(
        steps["weight_bytes"] / steps["bandwidth_bytes_per_s"] * 1e3
    )
    assert 0 < steps["decode_ms"] < 1000
    assert 0 < steps["verify_ms"] < 1000
