# Modules: specdec.config.llm_checks
"""Arguments of vLLM's programs: their values here, and the errors for unsupported ones."""

from pathlib import Path

import pytest
import torch

from cluster.config.serve_config import ServeConfig
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm.arguments import LLMArguments, read_arguments
from specdec.types.errors import InvalidValueError


def test_defaults():
    arguments = read_arguments("smollm2-135m-instruct", {})
    assert arguments.config.model == arguments.model_name == "smollm2-135m-instruct"
    assert (arguments.seed, arguments.metric_prefix) == (0, None)
    assert (arguments.logs_stats, arguments.executor) == (False, None)
    assert arguments.config.speculative_config is not None
    assert arguments.config.max_queue_len == 1_000_000


class Checkpoint:
    """A path whose text is not that of its file."""

    def __fspath__(self):
        return "smollm2-135m-instruct"


@pytest.mark.parametrize("path", [Path("smollm2-135m-instruct"), Checkpoint()])
def test_a_path_is_a_directory_even_with_the_name_of_an_alias(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = {"tokenizer": path, "speculative_config": {"method": "draft_model", "model": path}}
    config = read_arguments(path, given).config
    assert config.model == config.draft_model.model == str(tmp_path / "smollm2-135m-instruct")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"quantization": None}, "quantization", "none"),
        ({"quantization": "int8"}, "quantization", "int8"),
        ({"revision": "v2"}, "model", "org/name@v2"),
        ({"kv_cache_memory_bytes": 2**29}, "kv_cache_memory_gib", 0.5),
        ({"generation_config": "vllm"}, "generation_config", "none"),
        ({"max_queue_len": 5}, "max_queue_len", 5),
        ({"speculative_config": None}, "speculative_config", None),
        ({"speculative_config": SpeculativeConfig.of("suffix")}, "speculative_config",
         SpeculativeConfig.of("suffix")),
        ({"speculative_config": {"model": "[ngram]"}}, "speculative_config",
         SpeculativeConfig.of("ngram")),
        ({"speculative_model": "small", "num_speculative_tokens": 5}, "speculative_config",
         SpeculativeConfig.of("draft_model", 5, model="small")),
        ({"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 3}, "speculative_config",
         SpeculativeConfig.of("ngram", prompt_lookup_min=3, prompt_lookup_max=3)),
        ({"speculative_model": None}, "model", "org/name"),
        ({"num_speculative_tokens": 5}, "speculative_config", SpeculativeConfig.of("ngram", 5)),
        ({"spec_tokens": 5, "spec_method": "suffix"}, "speculative_config",
         SpeculativeConfig.of("suffix", 5)),
        ({"speculative_model": "small", "speculative_config": {"num_speculative_tokens": 2}},
         "speculative_config", SpeculativeConfig.of("draft_model", 2, model="small")),
        ({"kv_cache_memory_bytes": None, "kv_cache_memory_gib": 2}, "kv_cache_memory_gib", 2),
        ({"load_format": "safetensors", "runner": "auto"}, "model", "org/name"),
        ({"cpu_offload_gb": 0.0, "data_parallel_size": 1}, "model", "org/name"),
        ({"enforce_eager": True, "trust_remote_code": False}, "model", "org/name"),
        ({"tokenizer": "org/name", "runner": "generate"}, "model", "org/name"),
    ],
)  # fmt: skip
def test_accepted_arguments(given, field, value):
    assert getattr(read_arguments("org/name", given).config, field) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size?"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be a whole number"),
        ({"trust_remote_code": True}, "remote code of a model is never executed"),
        ({"speculative_model": "a", "speculative_config": {"model": "b"}}, "beside a speculative_"),
        (
            {"speculative_model": "a", "speculative_config": None},
            "where speculative_config is none",
        ),
        (
            {"quantization": "quip"},
            "quantization is 'quip'; it must be one of none, int8, w8a8",
        ),
        ({"load_format": "pt"}, "load_format is 'pt'; it must be auto, or left out"),
        ({"kv_cache_memory_bytes": "4G"}, "kv_cache_memory_bytes is '4G'; it must be None, or a"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes is -1"),
        ({"kv_cache_memory_bytes": 1, "kv_cache_memory_gib": 1}, "left out where kv_cache_memory_"),
        (
            {"speculative_config": {"mode": "ngram"}},
            "unknown speculative_config key 'mode'; .* mode",
        ),
        ({"tokenizer": "other"}, "it comes with the model"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of auto, float32"),
        ({"seed": -1}, "seed is -1; it must be None, or"),
        ({"metric_prefix": 3}, "metric_prefix is 3; it must be a string"),
        ({"disable_log_stats": 1}, "disable_log_stats is 1; it must be true or false"),
        ({"distributed_executor_backend": "mp"}, "is 'mp'; it must be ray"),
        ({"pipeline_parallel_size": 2}, "set tensor_parallel_size"),
    ],
)
def test_rejected_arguments_and_their_messages(given, message):
    with pytest.raises(InvalidValueError, match=message):
        read_arguments("org/name", given)


def test_the_error_for_an_unknown_name_omits_its_value():
    with pytest.raises(InvalidValueError, match="hf_token") as caught:
        read_arguments("org/name", {"hf_token": "hf_secret"})
    assert "hf_secret" not in str(caught.value)


def test_details_without_a_method_default_to_auto_as_in_a_service():
    details = {"num_speculative_tokens": 3}
    model = "smollm2-135m-instruct"
    service = ServeConfig.from_sources({"model": model} | details)
    assert read_arguments(model, details).config.speculative_config == service.speculative_config


@pytest.mark.parametrize(
    ("given", "executor"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, "ray"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"speculative_config": {"model": "small", "draft_tensor_parallel_size": 2}}, "ray"),
    ],
)
def test_several_ranks_run_on_ray(given, executor):
    assert read_arguments("org/name", given).executor == executor


def test_every_setting_is_an_argument():
    assert LLMConfig.settings().keys() - {"model"} <= LLMArguments.__annotations__.keys()
