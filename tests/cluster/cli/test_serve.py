# Modules: cluster.config.secrets
"""`specdec serve`: its flags, including vLLM's, and the configuration that they create."""

import os
import re
import sys
import types
from contextlib import nullcontext
from unittest.mock import Mock, call

import pytest

from cluster.api.base.authentication import read_keys
from cluster.cli import serve as cli_serve
from cluster.cli.serve import OTHER, SECTIONS
from cluster.config.secrets import KEYS_VARIABLE
from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import ALWAYS, RENAMED
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import OutOfMemoryError
from tests.cluster.cli.conftest import fails_with, run_cli
from tests.cluster.full_pipes import stderr_in_pipe


@pytest.fixture
def guard():
    """Return what the command calls for a guard, without which it does not fork."""
    return Mock(return_value=nullcontext())


@pytest.fixture
def served(monkeypatch, guard):
    """Replace the service; return the configurations that it was started with."""
    configs = []
    fake = types.ModuleType("cluster.serve.startup")
    fake.serve_forever = lambda config, report, others, _: configs.extend([config, *others])
    monkeypatch.setitem(sys.modules, "cluster.serve.startup", fake)
    monkeypatch.setattr(cli_serve, "guarded", guard)
    return configs


def test_serve_with_defaults(served):
    assert run_cli("serve").exit_code == 0
    assert served == [ServeConfig()]


def test_the_guard_knows_the_longest_drain_and_the_ray(served, guard, tmp_path):
    path = tmp_path / "serve.yaml"
    models = "{model: a/one, drain_timeout_s: 7}, {model: a/two, drain_timeout_s: 9}"
    path.write_text(f"ingress: serve\nmodels: [{models}]\n")
    assert run_cli("serve", "--config", str(path)).exit_code == 0
    assert run_cli("serve", "--ingress", "serve", "--ray-address", "head:6379").exit_code == 0
    default = ServeConfig().drain_timeout_s
    assert guard.mock_calls == [call(9.0, is_joined=False), call(default, is_joined=True)]


def test_serve_has_a_flag_for_each_setting():
    text = run_cli("serve", "--help").stdout
    for name in ServeConfig.settings():
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", text), name


def test_flags_take_precedence_over_the_file(served, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: tiny\ngrpc_port: 9001\nstep_timeout_s: 5\n")
    flags = ["--grpc-port", "9002", "--speculative-config", "none", "--kv-cache-memory-gib", "0.5"]
    result = run_cli("serve", "--config", str(path), *flags)
    assert result.exit_code == 0
    assert served == [
        ServeConfig(
            model="tiny",
            grpc_port=9002,
            step_timeout_s=5,
            kv_cache_memory_gib=0.5,
            speculative_config=None,
        )
    ]


def test_a_file_may_list_several_models(served, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("ingress: serve\nmodels:\n  - {model: a/one}\n  - {model: a/two}\n")
    assert run_cli("serve", "--config", str(path), "--block-size", "8").exit_code == 0
    assert [each.model for each in served] == ["a/one", "a/two"]
    assert {each.block_size for each in served} == {8}
    message = "model is 'a/b'; it must be left out beside models; set it in each entry"
    fails_with(run_cli("serve", "--config", str(path), "--model", "a/b"), message, 2)
    fails_with(run_cli("serve", "a/b", "--config", str(path)), message, 2)


def test_serve_reads_speculation_as_json(served):
    run_cli("serve", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert served[0].speculative_config.num_speculative_tokens == 5


def test_serve_rejects_values_out_of_range(served):
    result = run_cli("serve", "--grpc-port", "70000")
    fails_with(result, "grpc_port is 70000; it must be a whole number from 1 to 65535", 2)
    assert served == []


def test_serve_warns(served):
    result = run_cli("serve", "--host", "0.0.0.0")
    assert result.exit_code == 0
    assert result.stderr == ("warning: 0.0.0.0 is reachable from other machines, and TLS is off\n")


def test_serve_prints_each_warning_once(served, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("{ingress: serve, host: 0.0.0.0, models: [{model: a/one}, {model: a/two}]}\n")
    [warning] = run_cli("serve", "--config", str(path)).stderr.splitlines()
    assert warning.startswith("warning: 0.0.0.0 is reachable")


def test_a_service_that_fails_to_start(served, monkeypatch, capfd):
    def fail(config, report, others, to_guard):
        report("starting")
        raise OutOfMemoryError("2 GiB needed, 1 GiB free")

    monkeypatch.setattr(sys.modules["cluster.serve.startup"], "serve_forever", fail)
    result = run_cli("serve")
    assert result.exit_code == 2
    assert capfd.readouterr().err == "starting\nerror: 2 GiB needed, 1 GiB free\n"


def test_a_service_that_fails_to_start_ends_although_nothing_reads_its_error(served, monkeypatch):
    reason = "2 GiB needed" * 2**17  # more than a pipe holds

    def fail(config, report, others, to_guard):
        raise OutOfMemoryError(reason)

    monkeypatch.setattr(sys.modules["cluster.serve.startup"], "serve_forever", fail)
    with stderr_in_pipe() as reader:
        assert run_cli("serve").exit_code == 2
        assert os.read(reader, 2**20).startswith(b"error: 2 GiB needed")


# the help


def test_every_setting_is_in_one_section():
    members = [name for names in SECTIONS.values() for name in names]
    assert sorted(members) == sorted(ServeConfig.settings())
    assert f"{OTHER}:" not in run_cli("serve", "--help").stdout


def test_the_help_has_the_sections_in_order():
    text = run_cli("serve", "--help").stdout
    positions = [text.index(f"\n{heading}:\n") for heading in SECTIONS]
    assert positions == sorted(positions)


# flags of vLLM


def test_the_model_may_be_an_argument(served):
    assert run_cli("serve", "tiny").exit_code == 0
    assert served == [ServeConfig(model="tiny")]
    assert run_cli("serve", "tiny", "--model", "other").exit_code == 2


def test_flags_with_the_names_of_vllm(served):
    flags = "-tp 2 --port 8001 --dtype half --generation-config vllm --max-num-seqs 8"
    assert run_cli("serve", "tiny", *flags.split()).exit_code == 0
    assert served == [
        ServeConfig(
            model="tiny",
            tensor_parallel_size=2,
            http_port=8001,
            dtype="float16",
            generation_config="none",
            max_num_seqs=8,
        )
    ]


@pytest.mark.parametrize(
    "modules",
    [
        ["sql=org/sql,chat=org/chat"],
        ["sql=org/sql", "chat=org/chat"],
        ['{"name": "sql", "path": "org/sql"}', '{"name": "chat", "path": "org/chat"}'],
    ],
)
def test_adapters_as_in_vllm(served, modules):
    flags = ["--enable-lora", "--max-loras", "2", "--lora-modules", *modules, "--port", "8001"]
    result = run_cli("serve", "tiny", *flags)
    assert result.exit_code == 0, result.stderr
    [config] = served
    orders = [AdapterOrder.load(name, f"org/{name}") for name in ("sql", "chat")]
    assert list(config.startup_adapters) == orders
    assert (config.http_port, config.max_loras) == (8001, 2)


def test_underscores_are_dashes_in_the_name_of_a_flag(served):
    run_cli("serve", "--max_model_len", "99", "--served_model_name=my_model")
    assert served == [ServeConfig(max_model_len=99, served_model_name="my_model")]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--speculative-model ./small --num-speculative-tokens 5 "
            "--speculative-draft-tensor-parallel-size 2 --speculative-disable-by-batch-size 8",
            SpeculativeConfig.of(
                "draft_model",
                5,
                model="./small",
                draft_tensor_parallel_size=2,
                speculation_threshold=8,
            ),
        ),
        (
            "--speculative-model [ngram] --ngram-prompt-lookup-max 5 --ngram-prompt-lookup-min 3",
            SpeculativeConfig.of("ngram", prompt_lookup_min=3, prompt_lookup_max=5),
        ),
        ("--spec-method suffix --spec-tokens 7", SpeculativeConfig.of("suffix", 7)),
    ],
)
def test_speculation_key_by_key(served, flags, expected):
    assert run_cli("serve", *flags.split()).exit_code == 0
    assert served[0].speculative_config == expected


def test_every_key_of_speculation_has_a_flag():
    text = run_cli("serve", "--help").stdout
    for name in [*SPECULATION_KEYS, *RENAMED]:
        assert re.search(rf"--{name.replace('_', '-')}[ ,\n]", text), name


@pytest.mark.parametrize(
    "name", [name for name in ALWAYS if not {True, False} & {*ALWAYS[name].synonyms}]
)
def test_flags_of_vllm_with_one_supported_value(served, name):
    flag, value = f"--{name.replace('_', '-')}", ALWAYS[name].value
    right, wrong = ([flag, str(value)], [flag, "7"])
    if isinstance(value, bool):
        right, wrong = [flag], [f"--no-{flag[2:]}"]
        right, wrong = (right, wrong) if value else (wrong, right)
    assert run_cli("serve", *right).exit_code == 0
    assert served == [ServeConfig()]
    result = run_cli("serve", *wrong)
    assert result.exit_code == 2
    assert ALWAYS[name].reason in result.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--swap-space", "4"], "No such option '--swap-space'"),
        (["--max-model-length", "4"], "(Did you mean one of: '--max-model-len'"),
        (["--quantization", "quip"], "'quip' is not one of 'none', 'int8', 'w8a8'"),
    ],
)
def test_unknown_flags_and_values_are_refused(served, flags, reason):
    result = run_cli("serve", *flags)
    assert (result.exit_code, served) == (2, [])
    assert reason in " ".join(result.stderr.split())


# keys


@pytest.fixture
def no_keys(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, "from-before")


def test_api_keys_cannot_be_passed_to_an_existing_ray_cluster(served, no_keys):
    """Its processes have another environment: the service would accept every client."""
    flags = ["--ray-address", "auto", "--ingress", "serve"]
    result = run_cli("serve", "--api-key", "first-key", *flags)
    assert (result.exit_code, served) == (2, [])
    assert "use --api-key-file" in " ".join(result.stderr.split())


def test_keys_reach_the_replicas_through_the_environment(served, no_keys):
    result = run_cli("serve", "--api-key", "first-key", "--api-key", "second-key")
    assert [each.key for each in read_keys("api_key_file", None)] == ["first-key", "second-key"]
    assert "--api-key is visible to other users of this machine" in result.stderr
    assert "first-key" not in result.stderr
    assert "first-key" not in str(served[0].to_mapping())


@pytest.mark.parametrize("key", ["short", "a key with spaces", "a,key,with,commas", " "])
def test_an_invalid_key_is_rejected_and_not_shown(served, no_keys, key):
    result = run_cli("serve", "--api-key", key)
    assert result.exit_code == 2
    assert "not shown" in result.stderr
    assert key.strip() == "" or key not in result.stderr
    assert served == []


def test_keys_come_from_one_place(served, no_keys, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("[{name: a, key: long-enough}]")
    flags = ["--api-key-file", str(path), "--api-key", "another-key"]
    assert run_cli("serve", *flags).exit_code == 2
