# Modules: specdec.speculation.policy.sample_text
"""Tests of the profiler of the engine's own part of a step."""

import pytest

from specdec.engine.engine import Engine
from specdec.engine.engine_profiler import EngineProfiler, draft_profile_text
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.policy.sample_text import SAMPLE_TEXT
from specdec.text.tokenizer import Tokenizer
from tests.clock import Clock
from tests.specdec.engines import engine_config
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer


class TimedEngine(Engine):
    """An engine whose step takes 1 ms, and 2 ms for each row's token."""

    clock: Clock

    def _send(self, rows):
        self.clock.now_s += 0.001 + 0.002 * sum(len(row.token_ids) for _, row in rows)
        super()._send(rows)


@pytest.fixture
def profile(tiny_model_dir, monkeypatch):
    clock = TimedEngine.clock = Clock()
    monkeypatch.setattr("specdec.engine.engine_profiler.Engine", TimedEngine)
    model, tokenizer = ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir)

    def profile(budget_s, **changes):
        config = engine_config(**changes)
        return EngineProfiler(config, model, tokenizer, clock).measure(4, budget_s)

    return profile


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_table_holds_the_engines_own_times(profile, block_size):
    table = profile(100.0, max_num_seqs=8, max_num_batched_tokens=256, block_size=block_size)
    assert (table.batch_sizes, table.draft_tokens) == ((1, 4, 8), (0, 1, 2, 4))
    for size in table.batch_sizes:
        for count in table.draft_tokens:
            expected_s = 0.001 + 0.002 * size * (1 + count)
            assert table.step_s(size, count) == pytest.approx(expected_s)


def test_a_budget_is_respected(profile):
    clock = TimedEngine.clock
    begun_at_s = clock.now_s
    table = profile(0.05, max_num_seqs=8, max_num_batched_tokens=64)
    assert clock.now_s - begun_at_s < 0.3
    assert table.step_s(8, 4) > table.step_s(1, 0)


def test_real_engines_take_longer_for_larger_batches(tiny_model_dir):
    model, tokenizer = ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir)
    config = engine_config(3, max_num_seqs=64, max_num_batched_tokens=512)
    table = EngineProfiler(config, model, tokenizer).measure(3, 1.0)
    assert table.step_s(64, 0) > 4 * table.step_s(1, 0)
    assert table.step_s(64, 3) > table.step_s(64, 0)


def test_a_mixture_of_experts_that_drafts_has_a_text_in_its_vocabulary(tiny_model_dir, tmp_path):
    save_family(tmp_path, "mixtral")
    tokenizer = train_tokenizer(383)
    tokenizer.save_pretrained(tmp_path)
    found = draft_profile_text(tmp_path)
    assert tokenizer.decode(found) == SAMPLE_TEXT
    assert draft_profile_text(tiny_model_dir) == draft_profile_text(None) == ()
