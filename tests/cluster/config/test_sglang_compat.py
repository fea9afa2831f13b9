"""Flags of `sglang.launch_server`, as they are pasted and in files."""

import shlex

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.config import sglang_compat
from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import (
    ALL_ALWAYS,
    ALL_RENAMED,
    ALL_SPECULATION_KEYS,
    in_our_words,
)
from specdec.types.errors import InvalidValueError
from tests.cluster.cli.test_serve import guard, served

__all__ = ["guard", "served"]


def run(line):
    return CliRunner().invoke(main.main, ["serve", *shlex.split(line)])


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--model-path org/name --port 30000 --host 0.0.0.0", {"model": "org/name",
         "http_port": 30000, "host": "0.0.0.0"}),
        ("--model-path a --tp-size 2 --context-length 4096", {"tensor_parallel_size": 2,
         "max_model_len": 4096}),
        ("--model-path a --tp 1 --max-running-requests 16 --chunked-prefill-size 512",
         {"max_num_seqs": 16, "max_num_batched_tokens": 512}),
        ("--model-path a --mem-fraction-static 0.8 --random-seed 7 --page-size 32",
         {"gpu_memory_utilization": 0.8, "seed": 7, "block_size": 32}),
        ("--model-path a --disable-radix-cache", {"enable_prefix_caching": False}),
        ("--model-path a --disable-cuda-graph", {"enforce_eager": True}),
        ("--model-path a --enable-metrics --skip-server-warmup "
         "--schedule-policy lpm --grammar-backend xgrammar --dp-size 1", {"model": "a"}),
        ("--model-path a --cuda-graph-max-bs 8 --attention-backend fa3 --enable-torch-compile",
         {"model": "a", "enforce_eager": False}),
        ("--model-path a --tool-call-parser deepseekv3 --reasoning-parser deepseek-r1",
         {"tool_call_parser": "deepseek_v3", "reasoning_parser": "deepseek_r1"}),
        ("--model-path a --tool-call-parser minimax-m2", {"tool_call_parser": "minimax_m2"}),
    ],
)  # fmt: skip
def test_a_line_of_sglang_is_served(line, settings, served):
    result = run(line)
    assert result.exit_code == 0, result.stderr
    for name, value in settings.items():
        assert getattr(served[0], name) == value


DRAFT = "--model-path a --speculative-draft-model-path ./draft "


@pytest.mark.parametrize(
    ("flags", "method", "num_tokens", "num_tree_tokens"),
    [
        (DRAFT + "--speculative-algorithm EAGLE3 --speculative-num-steps 5 "
         "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6", "eagle3", 5, 0),
        (DRAFT + "--speculative-algorithm EAGLE --speculative-num-steps 5 "
         "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32", "eagle", 5, 31),
        (DRAFT + "--speculative-algorithm STANDALONE --speculative-num-steps 4", "draft_model",
         4, 0),
        ("--model-path a --speculative-algorithm NGRAM --speculative-num-draft-tokens 8", "ngram",
         7, 0),
        ("--model-path a --speculative-algorithm NEXTN --speculative-num-steps 1 "
         "--speculative-eagle-topk 1", "mtp", 1, 0),
    ],
)  # fmt: skip
def test_speculation_of_sglang(flags, method, num_tokens, num_tree_tokens, served):
    result = run(flags)
    assert result.exit_code == 0, result.stderr
    config = served[0].speculative_config
    assert (config.method, config.num_speculative_tokens) == (method, num_tokens)
    assert config.num_draft_tree_tokens == num_tree_tokens


def test_other_keys_of_a_drafter(served):
    window = "--speculative-draft-window-size 2048 --speculative-draft-model-quantization int8"
    assert run(DRAFT + f"--speculative-algorithm STANDALONE {window}").exit_code == 0
    drafter = served[0].draft_model
    assert (drafter.model, drafter.draft_window, drafter.quantization) == ("./draft", 2048, "int8")


def test_a_file_may_have_sglangs_names():
    read = in_our_words(
        {"model-path": "a", "speculative_algorithm": "EAGLE3", "speculative-num-draft-tokens": 4,
         "speculative_draft_model_path": "./b", "disable_radix_cache": False}
    )  # fmt: skip
    assert read["enable_prefix_caching"] is True
    config = ServeConfig.from_mapping(read).speculative_config
    assert (config.method, config.num_speculative_tokens) == ("eagle3", 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"speculative_eagle_topk": 4}, "gives the size of the tree"),
        ({"speculative_num_draft_tokens": 1}, "at least 2: it counts the token before"),
        ({"speculative_num_draft_tokens": "4"}, "it must be a whole number"),
        (
            {"speculative_num_draft_tokens": 9, "speculative_num_steps": 4},
            r"speculative_num_steps and one \(4 \+ 1\)",
        ),
        ({"disable_radix_cache": "yes"}, "it must be true or false"),
        ({"dp_size": 2}, "set num_replicas instead"),
        ({"schedule_policy": "random"}, "requests run by priority"),
        ({"model_path": "a", "model": "b"}, "left out where model is given, too"),
        (
            {"enable_prefix_caching": True, "disable_radix_cache": True},
            "left out where enable_prefix_caching is given, too",
        ),
    ],
)
def test_the_error_for_a_flag_without_a_counterpart(source, message):
    with pytest.raises(InvalidValueError, match=message):
        in_our_words(source)


def test_the_tables_name_each_flag_once():
    names = [*ALL_RENAMED, *ALL_SPECULATION_KEYS, *ALL_ALWAYS, *sglang_compat.DISABLES]
    names += sglang_compat.TREE_FLAGS
    assert len(names) == len(set(names))
    assert not set(names) & set(ServeConfig().to_mapping())
