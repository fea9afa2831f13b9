"""`specdec models`: downloads, the list, and what would run a model."""

import json
import shutil
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.cli.models import DTYPES, KERNELS, KV_DTYPES, QUANTIZATIONS
from specdec.config.engine import DTYPE_BYTES, Kernels
from specdec.config.kv_cache import KV_CACHE_DTYPES
from specdec.config.llm import LLMConfig
from specdec.config.quantization import QUANTIZATION_METHODS
from specdec.llm import drafter_choice
from specdec.llm.drafter_choice import with_fastest_drafter
from specdec.models.resolve import packaged_directory
from specdec.types.errors import ModelNotFoundError
from specdec.worker import native_library_fault
from tests.cluster.cli.conftest import fails_with, run_cli
from tests.specdec.llm.shipped import measured_speeds, shipped_aliases
from tests.specdec.models.families import save_family


def test_fetch_prints_where_the_model_is(monkeypatch, tmp_path):
    def resolve(name, cache_dir=None, progress=None):
        progress(f"fetching {name}")
        return tmp_path / name

    monkeypatch.setattr("specdec.models.resolve.resolve", resolve)
    result = run_cli("models", "fetch", "tiny")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'tiny'}\n"
    assert result.stderr == "fetching tiny\n"
    result = json.loads(run_cli("models", "fetch", "tiny", "--json").stdout)
    assert result == {"name": "tiny", "directory": str(tmp_path / "tiny")}


def test_fetching_an_unknown_model(monkeypatch):
    def resolve(name, cache_dir=None, progress=None):
        raise ModelNotFoundError("no model is called 'tiny'")

    monkeypatch.setattr("specdec.models.resolve.resolve", resolve)
    fails_with(run_cli("models", "fetch", "tiny"), "no model is called 'tiny'")


def test_list_shows_what_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    assert "smollm2-135m-instruct\tnot fetched (" in run_cli("models", "list").stdout
    directory = packaged_directory("smollm2-135m-instruct", tmp_path)
    directory.mkdir(parents=True)
    assert f"smollm2-135m-instruct\t{directory}\n" in run_cli("models", "list").stdout
    [model] = json.loads(run_cli("models", "list", "--json").stdout)["models"]
    assert model["name"] == "smollm2-135m-instruct"
    assert (model["directory"], model["download_bytes"] > 0) == (str(directory), True)


def test_show_reports_decoder_memory_and_methods(tiny_model_dir):
    result = run_cli("models", "show", str(tiny_model_dir), "--tensor-parallel-size", "2")
    assert result.exit_code == 0
    begin = len("colocated_draft_model  ")
    lines = {line[:begin].rstrip(): line[begin:] for line in result.stdout.splitlines()}
    assert lines["architecture"].startswith("LlamaForCausalLM: biases by")
    assert lines["precision"] == "float32 (float32 in files), no quantization"
    assert lines["ngram"].startswith("ready: ")
    assert lines["draft_model"].startswith("needs files: ")
    assert lines["mtp"].startswith("no: the checkpoint has no layers for")
    assert lines["colocated_draft_model"].startswith("needs files: ")
    assert result.stdout.count(" KiB of KV a token") == 2
    arguments = ("--kernels", "torch", "--quantization", "int8", "--json")
    report = json.loads(run_cli("models", "show", str(tiny_model_dir), *arguments).stdout)
    assert report["decoder"] == "torch: kernels is torch"
    assert report["quantization"] == "int8"
    files = ["generation_config.json", "config.json", "tokenizer_config.json"]
    assert report["end_tokens"] == [{"token_id": 2, "files": files}]
    assert lines["end tokens"] == f"2 ({', '.join(files)})"
    assert report["ranks"][0]["kv_bytes_per_token"] == 2 * 2 * 3 * 16 * 4
    report = json.loads(
        run_cli("models", "show", str(tiny_model_dir), *arguments, "--kv-cache-dtype", "fp8").stdout
    )
    assert report["ranks"][0]["kv_bytes_per_token"] == 2 * 2 * 3 * 16


def test_show_names_the_format_that_triton_keeps(tiny_model_dir, tmp_path):
    directory = tmp_path / "fp8"
    shutil.copytree(tiny_model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps(config))
    shown = run_cli("models", "show", str(directory), "--kernels", "triton").stdout
    assert "float32 (float32 in files), fp8 as stored" in shown


@pytest.mark.skipif(bool(native_library_fault()), reason="no C++ compiler")
def test_show_reports_the_drafters_of_an_alias(tiny_model_dir, tmp_path, monkeypatch):
    shipped_aliases(tiny_model_dir, tmp_path, monkeypatch)
    monkeypatch.setattr("specdec.models.resolve.resolve", lambda name, progress: tiny_model_dir)
    monkeypatch.setattr(drafter_choice, "measure_in_process", measured_speeds)
    result = run_cli("models", "show", "tiny", "--drafters", "--quantization", "int8")
    assert (result.exit_code, result.stdout.splitlines()[-5:]) == (
        0,
        [
            "expected speed of one stream, medians of 5 alternating rounds",
            "drafter      runs in  tokens/s  gain  rounds",
            "tiny-ngram   engine   120       1.20  1.20 to 1.20  chosen",
            "tiny-lookup  engine   110       1.10  1.10 to 1.10",
            "no drafts             100       1.00",
        ],
    )
    assert result.stderr.startswith("measuring the drafters of tiny")
    result = run_cli("models", "show", "tiny", "--drafters", "--quantization", "int8", "--json")
    assert result.stderr == ""
    assert [row["gain"] for row in json.loads(result.stdout)["drafters"]["rows"]] == [1.2, 1.1]
    # A service with these settings reads what is stored.
    config = LLMConfig(model="tiny", quantization="int8")
    found = with_fastest_drafter(config, lambda _: None, pytest.fail)
    assert found.speculative_config.method == "ngram"


def test_show_has_no_drafters_of_another_model(tiny_model_dir):
    result = run_cli("models", "show", str(tiny_model_dir), "--drafters")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it must be an alias with drafters (smollm2-135m-instruct)" in result.stderr


def test_show_reports_native_latent_attention(tmp_path):
    save_family(tmp_path, "deepseek-v3")
    report = json.loads(run_cli("models", "show", str(tmp_path), "--json").stdout)
    assert report["decoder"] == "native C++ kernels"
    assert report["ranks"][0]["kv_bytes_per_token"] == 3 * (34 + 6) * 4


def test_show_reports_states_and_their_snapshots(tmp_path):
    save_family(tmp_path, "qwen3.5")
    result = run_cli("models", "show", str(tmp_path))
    [rank] = [line for line in result.stdout.splitlines() if line.startswith("rank 0")]
    states = json.loads(run_cli("models", "show", str(tmp_path), "--json").stdout)["ranks"][0]
    assert f"{states['state_bytes'] / 2**10:.1f} KiB of states a sequence" in rank
    assert rank.endswith("and a snapshot of the states for 512 tokens of KV")


def test_show_refuses_a_model_that_cannot_be_served(tmp_path):
    content = {"architectures": ["MambaForCausalLM"], "state_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = run_cli("models", "show", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "MambaForCausalLM is not supported: it has state-space layers" in result.stderr


def test_show_exits_with_2_for_files_that_do_not_load(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    path, name = tmp_path / "model.safetensors", "model.norm.weight"
    save_file(load_file(path) | {name: torch.ones(144, dtype=torch.int8)}, path)
    result = run_cli("models", "show", str(tmp_path))
    assert result.exit_code == 2
    assert f"{'fault':23}{name} has codes of type I8" in result.stdout
    result = run_cli("models", "show", str(tmp_path), "--json")
    assert result.exit_code == 2
    report = json.loads(result.stdout)["checkpoint"]
    assert len(report["faults"]) == 1
    assert report["notes"] == ["the output head is the embedding (tie_word_embeddings)"]


def test_choices_of_show_are_those_of_the_engine():
    assert set(DTYPES) == set(DTYPE_BYTES)
    assert set(QUANTIZATIONS) == {"none", *QUANTIZATION_METHODS}
    assert set(KERNELS) == set(get_args(Kernels))
    assert KV_DTYPES == KV_CACHE_DTYPES
