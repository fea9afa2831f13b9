"""Random heads load as what they are meant to be; shares are of the target's step."""

import random
import time
from functools import partial

import pytest
import torch

from benchmarks import random_heads, tree_verification
from benchmarks.head_cases import TARGET, HeadBench, HeadCase, write_heads
from benchmarks.heads import bars, measure, print_table, summarize
from benchmarks.random_heads import DRAFT_VOCAB, write_dspark, write_eagle3, write_medusa
from benchmarks.step_bench import PRECISIONS
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from tests.benchmarks.test_forward_pass import CONFIG as TINY
from tests.specdec.tiny import tiny_llama_dir

SIZES = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 2 * DRAFT_VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": TINY.rms_norm_eps,
        "max_position_embeddings": 64,
    },
    {},
)


def test_random_eagle3(tmp_path):
    found = HeadConfig.from_directory(write_eagle3(tmp_path / "head", SIZES), SIZES)
    assert found.method == "eagle3"
    assert found.draft_vocab_size == DRAFT_VOCAB
    assert found.taps == (2, 3)  # of three defaults in 6 layers, two are equal


@pytest.mark.parametrize("is_shared", [True, False])
def test_random_medusa(tmp_path, is_shared):
    directory = write_medusa(tmp_path / "head", SIZES, is_shared=is_shared)
    found = HeadConfig.from_directory(directory, SIZES)
    assert (found.method, found.max_draft_tokens) == ("medusa", 5)
    assert found.shape.lm_heads == ("shared" if is_shared else "own")
    assert found.draft_vocab_size == DRAFT_VOCAB


def test_random_dspark(tmp_path):
    found = HeadConfig.from_directory(write_dspark(tmp_path / "head", SIZES), SIZES)
    assert (found.method, found.max_draft_tokens) == ("dspark", 7)
    assert (found.shape.decoder.num_layers, found.shape.markov_rank) == (2, 256)
    assert found.draft_vocab_size == DRAFT_VOCAB


class Work:
    """Cases by (seconds, repeats, reference), on a simulated clock; done: the names in order."""

    def __init__(self, costs):
        self.now_s, self.done = 0.0, []
        self.cases = {
            name: HeadCase(partial(self._run, name, cost), *others)
            for name, (cost, *others) in costs.items()
        }

    def _run(self, name, cost):
        self.now_s += cost
        self.done.append(name)

    def timed(self, seed=0, loads=1):
        """Return the times of 5 rounds of each load."""
        timed, order = {}, random.Random(seed)
        for _ in range(loads):
            measure(self.cases, 5, lambda: self.now_s, order, timed)
        return timed


def timed_rows(costs):
    return summarize("fp32", Work(costs).timed())


def test_every_round_has_its_own_order_and_each_case_follows_the_target():
    work = Work({TARGET: (8.0,), "a": (1.0,), "b": (2.0,), "c": (3.0,)})
    timed = work.timed(loads=2)
    assert {name: len(each.seconds) for name, each in timed.items()} == dict.fromkeys(timed, 10)
    before, cases = work.done[::2], work.done[1::2]
    assert set(before) == {TARGET}
    rounds = [tuple(cases[first : first + 4]) for first in range(0, len(cases), 4)]
    assert all(sorted(each) == sorted(timed) for each in rounds)
    assert len(set(rounds)) > 5
    again = Work({TARGET: (8.0,), "a": (1.0,), "b": (2.0,), "c": (3.0,)})
    again.timed(loads=2)
    assert again.done == work.done, "the seed decides"


def test_share_is_of_one_repetition():
    rows = timed_rows({"target step": (8.0,), "eagle3 draft token": (2.0, 4)})
    assert [row.share for row in rows] == [1.0, 0.0625]
    (bar,) = bars(rows)
    assert (bar.name, bar.is_met) == ("eagle3 draft token / target step, fp32", True)


def test_a_tree_is_compared_with_its_chain(capsys):
    chain, tree = "chain of 16 behind 128", "tree of 16 behind 128"
    rows = timed_rows({"target step": (4.0,), chain: (8.0,), tree: (10.0, 1, chain)})
    assert [row.share for row in rows] == [1.0, 2.0, 1.25]
    (bar,) = bars(rows)
    assert (bar.name, bar.limit, bar.is_met) == (f"{tree} / {chain}, fp32", 1.1, False)
    print_table(rows)
    assert f"125.0 % of {chain}, at most 110 %" in capsys.readouterr().out


def test_every_case_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCAB", 64)
    monkeypatch.setattr(tree_verification, "CONTEXT_TOKENS", (128,))
    target, heads = tiny_llama_dir(tmp_path / "target", layers=6), tmp_path / "heads"
    heads.mkdir()
    write_heads(heads, ModelConfig.from_directory(target))
    with torch.inference_mode():
        rows = []
        for precision in ("fp32", "int8"):
            order, timed = random.Random(0), {}
            cases = HeadBench(target, heads, PRECISIONS[precision], order).cases()
            measure(cases, 1, time.perf_counter, order, timed)
            rows += summarize(precision, timed)
    assert all(row.ms > 0 for row in rows)
    limits = [bar.name.rpartition(", ")[2] for bar in bars(rows)]
    assert (limits.count("fp32"), limits.count("int8")) == (8, 6)
