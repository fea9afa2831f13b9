"""Random heads load as what they are meant to be; shares are of the target's step."""

import pytest

from benchmarks.heads import bars, measure
from benchmarks.random_heads import DRAFT_VOCAB, write_eagle3, write_medusa
from specdec.models.config import ModelConfig
from specdec.models.heads.config import HeadConfig
from tests.benchmarks.test_forward_pass import CONFIG as TINY

TARGET = ModelConfig.from_dict(
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
    found = HeadConfig.from_directory(write_eagle3(tmp_path / "head", TARGET), TARGET)
    assert found.method == "eagle3"
    assert found.draft_vocab_size == DRAFT_VOCAB
    assert found.taps == (2, 3)  # of three defaults in 6 layers, two are equal


@pytest.mark.parametrize("is_shared", [True, False])
def test_random_medusa(tmp_path, is_shared):
    directory = write_medusa(tmp_path / "head", TARGET, is_shared=is_shared)
    found = HeadConfig.from_directory(directory, TARGET)
    assert (found.method, found.max_draft_tokens) == ("medusa", 5)
    assert found.shape.lm_heads == ("shared" if is_shared else "own")
    assert found.draft_vocab_size == DRAFT_VOCAB


def test_share_is_of_one_repetition():
    now = 0.0
    costs = {"target step": 8.0, "eagle3 draft token": 2.0}

    def work(case):
        def run():
            nonlocal now
            now += costs[case]

        return run

    cases = {"target step": (work("target step"), 1)}
    cases["eagle3 draft token"] = (work("eagle3 draft token"), 4)
    rows = measure("fp32", cases, 5, lambda: now)
    assert [row.share for row in rows] == [1.0, 0.0625]
    (bar,) = bars(rows)
    assert bar.is_met
