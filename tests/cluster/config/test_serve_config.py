# Modules: cluster.config.serve_config, cluster.config.parsers, cluster.config.model_name
# Modules: cluster.config.ingress, specdec.config.engine, specdec.config.fields
import dataclasses
import json
import typing
from pathlib import Path

import pytest

from cluster.config.config_file import read_models
from cluster.config.serve_config import ServeConfig
from specdec.config.engine import DTYPE_BYTES, EngineConfig
from specdec.config.model_aliases import ALIASES
from specdec.config.quantization import (
    CHECKPOINT_QUANTIZATIONS,
    CPU_QUANTIZATION_METHODS,
    GPU_QUANTIZATION_METHODS,
    QUANTIZATION_METHODS,
)
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError

BY_DEVICE = ("dtype", "max_num_seqs", "max_num_batched_tokens")


@pytest.fixture
def tls_files(tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    return {"tls_cert_file": tmp_path / "cert.pem", "tls_key_file": tmp_path / "key.pem"}


def test_defaults():
    config = ServeConfig()
    assert config.model == config.served_model_name == "smollm2-135m-instruct"
    [first, *_] = ALIASES[config.model].drafters
    assert config.speculative_config == SpeculativeConfig.of(**first.keys("cpu"))
    assert config.speculative_config.is_auto
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("settings", "num_spares"),
    [
        ({"speculative_config": SpeculativeConfig.of("draft_model")}, 1),
        ({}, 0),  # the demo model drafts with a lookup or a head
        (
            {
                "speculative_config": SpeculativeConfig.of(
                    "draft_model", draft_tensor_parallel_size=2
                )
            },
            2,
        ),
        ({"speculative_config": SpeculativeConfig.of("ngram")}, 0),
        ({"speculative_config": None}, 0),
        ({"spare_draft_worker": False}, 0),
    ],
)
def test_each_draft_rank_has_a_spare_unless_that_is_turned_off(settings, num_spares):
    assert ServeConfig(**settings).num_spare_ranks == num_spares


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("tiny", "tiny"), ("/models/tiny/", "tiny"), ("models/tiny", "tiny")),
        *(("org/tiny", "tiny"), ("models/tiny-Q4.gguf", "tiny-Q4"), (".gguf", ".gguf")),
        ("models/tiny-00001-of-00003.gguf", "tiny"),
    ],
)
def test_the_default_served_model_name(model, name):
    assert ServeConfig(model=model).served_model_name == name
    assert ServeConfig(model=model, served_model_name="mine").served_model_name == "mine"


@pytest.mark.parametrize(
    ("device", "given", "limit"), [("cpu", None, 64), ("cpu", 300, 300), ("cuda", None, None)]
)
def test_the_default_of_max_prefill_tokens_depends_on_the_device(device, given, limit):
    config = ServeConfig(device=device, max_prefill_tokens=given, speculative_config=None)
    assert config.prefill_limit == limit


def test_defaults_and_limits_are_those_of_the_engine():
    config = ServeConfig()
    # Targets of a service take two steps; others may not. Some models have states, GPUs pad steps.
    assert config.async_scheduling
    others = {"async_scheduling", "keeps_guesses"}
    others |= {"state_bytes", "num_snapshots", "snapshot_interval", "most_padding_tokens"}
    for field in dataclasses.fields(EngineConfig):
        if field.default not in (dataclasses.MISSING, None) and field.name not in others:
            assert getattr(config, field.name) == field.default, field.name
    assert ServeConfig.settings()["dtype"].limit.options == ("auto", *DTYPE_BYTES)
    assert ServeConfig.settings()["quantization"].limit.options == (
        *("none", *QUANTIZATION_METHODS, *CHECKPOINT_QUANTIZATIONS),
    )
    assert ServeConfig().quantization_method is None
    for method in CPU_QUANTIZATION_METHODS:
        assert ServeConfig(quantization=method).quantization_method == method
    for extreme in (
        {"max_num_seqs": 4096, "max_num_batched_tokens": 2**20, "max_queue_len": 1_000_000},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_queue_len": 0, "block_size": 1},
        {"block_size": 1024, "max_prefill_tokens": 2**20, "stream_interval": 2**20},
        {"max_prefill_tokens": 1, "stream_interval": 1},
    ):
        ServeConfig(**extreme)
        EngineConfig(max_model_len=2**24, num_blocks=2**24, **extreme)


def test_every_literal_has_the_options_of_its_setting():
    hints = typing.get_type_hints(ServeConfig, localns={"SpeculativeConfig": SpeculativeConfig})
    for name, setting in ServeConfig.settings().items():
        if setting.limit.options:
            assert typing.get_args(hints[name]) == setting.limit.options


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("model", 5, "a non-empty string"),
        ("model", "", "a non-empty string"),
        ("served_model_name", ["a"], "a non-empty string"),
        ("served_model_name", "x" * 257, "at most 256 characters long"),
        ("tensor_parallel_size", 0, "a whole number from 1 to 1024"),
        ("tensor_parallel_size", True, "a whole number from 1 to 1024"),
        ("tensor_parallel_size", 2.0, "a whole number from 1 to 1024"),
        ("tensor_parallel_size", "2", "a whole number from 1 to 1024"),
        ("tensor_parallel_size", None, "a whole number from 1 to 1024"),
        ("dtype", "float64", "one of auto, float32, bfloat16, float16"),
        ("dtype", ["float32"], "one of auto, float32, bfloat16, float16"),
        ("max_model_len", 1, "a whole number from 2 to 16777216"),
        ("max_queue_len", -1, "a whole number from 0 to 1000000"),
        ("kv_cache_memory_gib", 0, "a number above 0"),
        ("kv_cache_memory_gib", True, "a number above 0"),
        ("kv_cache_memory_gib", float("inf"), "a number above 0"),
        ("step_timeout_s", float("nan"), "a number above 0"),
        ("step_timeout_s", None, "a number above 0"),
        ("step_timeout_s", 3e6, "a number above 0 and at most 2000000"),
        ("start_timeout_s", 1e10, "a number above 0 and at most 2000000"),
        ("drain_timeout_s", -0.1, "a number of at least 0"),
        ("drain_timeout_s", 1e10, "a number of at least 0 and at most 2000000"),
        ("upscale_delay_s", False, "a number of at least 0"),
        ("downscale_delay_s", None, "a number of at least 0"),
        ("num_replicas", 0, "a whole number from 1 to 1024"),
        ("max_replicas", 0, "a whole number from 1 to 1024"),
        ("grpc_port", 65536, "a whole number from 1 to 65535"),
        ("http_port", 9000, "different from grpc_port (9000)"),
        (
            "allowed_hosts",
            "a:80",
            "host names without ports, such as llm.example.com,*.internal, or *",
        ),
        (
            "allowed_hosts",
            [5],
            "host names without ports, such as llm.example.com,*.internal, or *",
        ),
        ("log_level", "INFO", "one of debug, info, warning, error"),
        ("transport", "udp", "one of auto, ipc, tcp"),
        ("model", "a\0b", "a non-empty string without null characters"),
        ("host", "a\0b", "a non-empty string without null characters"),
        ("state_dir", "a\0b", "the path of a directory"),
        ("tls_cert_file", "a\0b", "the path of an existing file"),
        ("tls_cert_file", "/no/such/file", "the path of an existing file"),
        ("state_dir", __file__, "the path of a directory"),
        ("max_num_batched_tokens", 63, "at least max_num_seqs (64)"),
        (
            "speculative_config",
            3,
            "a JSON object (a mapping), auto, or none to disable speculation",
        ),
        (
            "speculative_config",
            "[1]",
            "a JSON object (a mapping), auto, or none to disable speculation",
        ),
        ("speculative_config", "{", 'a JSON object such as {"method": "ngram"}, auto, or none'),
        ("speculative_config", "[" * 9000, 'a JSON object such as {"method": "ngram"}, auto,'),
        ("speculative_config", "9" * 5000, 'a JSON object such as {"method": "ngram"}, auto,'),
    ],
)
def test_an_invalid_value_is_reported_with_its_limit(field, value, limit):
    with pytest.raises(InvalidValueError) as caught:
        ServeConfig.from_mapping({field: value})
    assert caught.value.field == field
    assert caught.value.limit.startswith(limit)
    if field != "speculative_config":
        with pytest.raises(InvalidValueError):
            ServeConfig(**{field: value})


@pytest.mark.parametrize(
    "field",
    [
        name
        for name, setting in ServeConfig.settings().items()
        if setting.limit.accepts(None) and name not in BY_DEVICE
    ],
)
def test_none_is_allowed_for_optional_settings(field):
    assert getattr(ServeConfig.from_mapping({field: None}), field) is None


@pytest.mark.parametrize("field", BY_DEVICE)
def test_none_selects_the_default_of_the_device(field):
    found = ServeConfig.from_mapping({field: None})
    assert getattr(found, field) == getattr(ServeConfig(), field) is not None


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"max_num_seq": 3}, "'max_num_seq'; did you mean max_num_seqs?"),
        (
            {"speculative_config": {"num_spec_tokens": 3}},
            "unknown speculative_config key 'num_spec_tokens'; "
            "did you mean num_speculative_tokens?",
        ),
        ({"zzz": 3}, "unknown configuration key 'zzz'; known: model, "),
        ({"hf_token": "a"}, "'hf_token'; known: model, "),  # as max_prefill_tokens by half
        ({7: 3}, "unknown configuration key 7; known: model, "),
    ],
)
def test_an_unknown_key_is_rejected_with_the_nearest_one(mapping, message):
    with pytest.raises(InvalidValueError) as caught:
        ServeConfig.from_mapping(mapping)
    assert message in str(caught.value)


def test_tls_needs_both_files_and_the_embedded_ingress(tls_files):
    assert ServeConfig(**tls_files).tls_cert_file == tls_files["tls_cert_file"]
    for name in tls_files:
        with pytest.raises(InvalidValueError, match="given together with tls_cert_file"):
            ServeConfig(**{name: tls_files[name]})
    with pytest.raises(InvalidValueError, match="left out unless ingress is embedded"):
        ServeConfig(**tls_files, ingress="serve")


def test_loopback_needs_no_warning():
    assert ServeConfig(host="::1").warnings == ()


def test_other_hosts_without_tls_need_a_warning(tls_files):
    [warning] = ServeConfig(host="10.0.0.1").warnings
    assert "10.0.0.1" in warning
    assert ServeConfig(host="10.0.0.1", **tls_files).warnings == ()


def test_the_ingress_of_a_cluster_needs_a_warning():
    [warning] = ServeConfig(ingress="serve", ray_address="head:6379").warnings
    assert "all interfaces" in warning
    assert ServeConfig(ingress="serve").warnings == ()
    [warning] = ServeConfig(ingress="serve", host="0.0.0.0").warnings
    assert "TLS is off" in warning


def test_round_trip(tls_files):
    config = ServeConfig(
        model="/models/tiny",
        max_model_len=512,
        kv_cache_memory_gib=0.5,
        speculative_config=SpeculativeConfig.of(num_speculative_tokens=7, speculation_threshold=6),
        state_dir=Path("/var/lib/specdec"),
        **tls_files,
    )
    for each in (config, ServeConfig(), ServeConfig(speculative_config=None)):
        mapping = json.loads(json.dumps(each.to_mapping()))
        assert ServeConfig.from_mapping(mapping) == each


def test_relative_paths_become_absolute(tls_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {**tls_files, "state_dir": tmp_path / "state"}
    relative = {name: path.name for name, path in paths.items()}
    assert ServeConfig.from_mapping(relative) == ServeConfig(**paths)


def test_overrides_take_precedence_over_yaml(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: tiny\nmax_num_seqs: 8\nstep_timeout_s: 5\nspeculative_config: {method: ngram}\n"
    )
    [config] = read_models(path, {"max_num_seqs": 4})
    assert config == ServeConfig(model="tiny", max_num_seqs=4, step_timeout_s=5)


def test_help_has_description_limit_and_default():
    assert ServeConfig.settings()["max_num_seqs"].help == (
        "Maximum number of sequences that run concurrently (1 to 4096). "
        "Default: 64 on a CPU, 256 on a GPU."
    )
    for name, setting in ServeConfig.settings().items():
        assert setting.meaning, name
        assert setting.default, name


def test_auto_is_resolved_when_a_configuration_is_made(monkeypatch):
    monkeypatch.setattr("specdec.config.llm.resolved_device", {"auto": "cuda"}.get)
    assert ServeConfig(model="tiny", device="auto").device == "cuda"


def test_native_kernels_are_for_cpus():
    limit = "kernels is 'native'; it must be auto, triton or torch"
    with pytest.raises(InvalidValueError, match=limit):
        ServeConfig(device="cuda", kernels="native")
    assert ServeConfig(device="cuda").kernels == "auto"


@pytest.mark.parametrize(
    ("device", "kernels", "method", "limit"),
    [
        ("cuda", "auto", "w8a8", "left out, int8 or int4 where device is cuda"),
        ("cuda", "torch", "int8", "left out on a GPU with torch's kernels"),
        ("cuda", "torch", "int4", "left out on a GPU with torch's kernels"),
        ("cpu", "auto", "int4", "left out, int8 or w8a8 on a CPU"),
        ("cpu", "torch", "int4", "left out, int8 or w8a8 on a CPU"),
    ],
)
def test_quantization_is_that_of_the_device(device, kernels, method, limit):
    speculation = SpeculativeConfig.of("draft_model", quantization=method)
    for changes in ({"quantization": method}, {"speculative_config": speculation}):
        with pytest.raises(InvalidValueError, match=f"it must be {limit}"):
            ServeConfig(model="tiny", device=device, kernels=kernels, **changes)
    default = ServeConfig(device="cuda").speculative_config
    assert default.to_mapping().get("quantization") is None


@pytest.mark.parametrize("method", GPU_QUANTIZATION_METHODS)
def test_gpus_quantize_targets_and_drafts(method):
    speculation = SpeculativeConfig.of("draft_model", quantization=method)
    found = ServeConfig(
        model="tiny", device="cuda", quantization=method, speculative_config=speculation
    )
    assert found.quantization_method == found.draft_model.quantization == method


def test_w8a8_needs_native_kernels():
    speculation = SpeculativeConfig.of("draft_model", quantization="w8a8")
    for changes in ({"quantization": "w8a8"}, {"speculative_config": speculation}):
        with pytest.raises(InvalidValueError, match="left out or int8 where kernels is torch"):
            ServeConfig(model="tiny", kernels="torch", **changes)
        ServeConfig(model="tiny", **changes)
    assert ServeConfig(kernels="torch", quantization="int8").quantization_method == "int8"


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "http://localhost", "grpc://localhost:4317", "http://a:b", 4317]
)
def test_an_invalid_otlp_endpoint_is_reported(endpoint):
    with pytest.raises(InvalidValueError, match=r"otlp_traces_endpoint is .*a URL such as http"):
        ServeConfig(otlp_traces_endpoint=endpoint)


def test_traces_need_optional_packages(monkeypatch):
    endpoint = "https://collector:4317"
    assert ServeConfig(otlp_traces_endpoint=endpoint).otlp_traces_endpoint == endpoint

    def missing(name):
        raise ModuleNotFoundError(name)

    for find in (missing, lambda name: None):
        monkeypatch.setattr("cluster.config.serve_config.find_spec", find)
        with pytest.raises(InvalidValueError, match=r"extra tracing; see docs/install\.md"):
            ServeConfig(otlp_traces_endpoint=endpoint)
        assert ServeConfig().otlp_traces_endpoint is None


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ServeConfig.from_mapping({"profile_dir": "profiles", "state_dir": "state"})
    assert (config.profile_dir, config.state_dir) == (tmp_path / "profiles", tmp_path / "state")
