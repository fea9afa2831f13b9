"""The probe of a head at start-up: what it measures, and that it leaves no state."""

import logging
import shutil
from dataclasses import replace
from itertools import count

import pytest
from safetensors.torch import load_file, save_file

from specdec import LLM
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine import head_probe
from specdec.engine.head_probe import HeadProbe, ProbeResult, likely_causes
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import BadLogitsError
from specdec.worker import HeadFiles, LocalTarget, RankModel, load_target
from tests.specdec.engines import (
    HashTarget,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.heads import HEADS, fitted_medusa_dir
from tests.specdec.llm.models import arguments, metrics_of

CONFIG = engine_config(speculation=SpeculativeConfig.of("medusa", model="head"))
REQUESTS = [request(f"r{i}", [(29 * i + place) % 380 + 3 for place in range(9)]) for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tokenizer, tmp_path_factory):
    """Return Medusa heads that are fitted to what the target writes after the probe's prompts."""
    prompts = [tokenizer.encode(each)[:64] for each in head_probe._PROMPTS]
    asked = [request(str(i), each, max_tokens=48) for i, each in enumerate(prompts)]
    written = run(local_engine(tiny_model_dir, engine_config(0)), asked)
    texts = [[*each, *written[str(i)].token_ids] for i, each in enumerate(prompts)]
    return fitted_medusa_dir(tiny_model_dir, tmp_path_factory.mktemp("head"), texts)


@pytest.fixture(scope="module")
def random_dir(head_dir, tmp_path_factory):
    """Return the same heads for the tokens of another vocabulary."""
    directory = tmp_path_factory.mktemp("random")
    shutil.copy(head_dir / "config.json", directory)
    tensors = load_file(head_dir / "model.safetensors")
    changed = {name: each.roll(7, 0).contiguous() for name, each in tensors.items()}
    save_file(changed, directory / "model.safetensors")
    return directory


def spoil(directory, name):
    """Write NaN into a tensor of a checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name].flatten()[0] = float("nan")
    save_file(tensors, path)


def target_of(model_dir, head_dir, config=CONFIG, kernels="auto"):
    group, head = TensorParallelGroup(), HeadFiles(head_dir)
    runner = load_target(RankModel(model_dir, "float32", config, kernels=kernels, head=head), group)
    return LocalTarget(runner)


def probe(tokenizer, config=CONFIG, **changes):
    return HeadProbe(config, tokenizer, frozenset(), **changes)


def test_a_head_that_fits_and_one_that_does_not(tiny_model_dir, tokenizer, head_dir, random_dir):
    fits = probe(tokenizer).measure(target_of(tiny_model_dir, head_dir))
    assert fits.num_positions == 3 * 31
    assert fits.acceptance > 0.8
    assert fits.is_sound
    other = probe(tokenizer).measure(target_of(tiny_model_dir, random_dir))
    assert other.is_low


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_the_sequences_that_follow_are_those_without_a_probe(
    tiny_model_dir, tokenizer, method, tmp_path
):
    head = HEADS[method](tiny_model_dir, tmp_path, [list(range(3, 40))])
    config = replace(CONFIG, speculation=SpeculativeConfig.of(method, model=str(head)))
    drafts = []
    for is_probed in (False, True):
        target = target_of(tiny_model_dir, head, config)
        if is_probed:
            assert probe(tokenizer, config).measure(target).is_low
        engine = make_engine(tiny_model_dir, config, target)
        tokens = tokens_by(engine, REQUESTS)
        drafts.append((tokens, engine.stats().counts.speculation))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_head_with_nan_drafts_nothing(tiny_model_dir, tokenizer, tmp_path, kernels):
    head = HEADS["eagle"](tiny_model_dir, tmp_path, [list(range(3, 40))])
    spoil(head, "fc.weight")
    config = replace(CONFIG, speculation=SpeculativeConfig.of("eagle", model=str(head)))
    target = target_of(tiny_model_dir, head, config, kernels)
    result = probe(tokenizer, config).measure(target)
    assert (result.num_positions, result.acceptance, result.missing) == (93, 0, 1)
    assert not result.is_sound


@pytest.mark.parametrize("num_tokens", [64, 8])
def test_nan_logits_of_the_target_are_an_error(
    tiny_model_dir, tokenizer, head_dir, tmp_path, num_tokens
):
    """Also after a chunk of a prompt; the sequences are released."""
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, "model.norm.weight")
    config = replace(CONFIG, max_num_batched_tokens=num_tokens)
    target = target_of(tmp_path, head_dir, config)
    with pytest.raises(BadLogitsError, match="after 0 output tokens: the model produced NaN"):
        probe(tokenizer, config).measure(target)
    assert not target._runner._batch_state._states


@pytest.mark.parametrize(
    ("limits", "num_positions"),
    [
        ({"max_num_batched_tokens": 8}, 93),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, 31),
        ({"max_num_seqs": 2}, 62),
        ({"num_blocks": 40}, 31),
        ({"max_model_len": 40}, 54),
        ({"max_model_len": 8, "num_blocks": 4}, None),
    ],
)
def test_it_keeps_to_the_limits_of_the_engine(tokenizer, limits, num_positions):
    config = replace(CONFIG, **limits)
    target = DraftingTarget(config.block_size)
    result = probe(tokenizer, config).measure(target)
    assert (result and result.num_positions) == num_positions
    assert not target._tables, "sequences were not released"
    for step in target.steps:
        assert sum(len(row.token_ids) for row in step.rows) <= config.max_num_batched_tokens
        assert all(row.end < config.max_model_len for row in step.rows)
        tables = [each.block_ids for each in step.block_table_deltas]
        assert all(0 <= block < config.num_blocks for table in tables for block in table)


def test_it_stops_when_its_time_is_over(tokenizer):
    clock = count(0.0, 0.1)
    target = DraftingTarget(CONFIG.block_size)
    result = probe(tokenizer, clock=lambda: next(clock)).measure(target)
    assert 30 <= result.num_positions <= 45


def test_a_text_ends_at_an_end_token(tokenizer):
    ends = replace(probe(tokenizer), eos_token_ids=frozenset(range(10, 15)))
    assert ends.measure(DraftingTarget(CONFIG.block_size)) is None


class DraftingTarget(HashTarget):
    """Target whose head drafts the token at some distance from the one that is asked for."""

    def __init__(self, block_size, distance=0):
        super().__init__(block_size, 383)
        self.distance = distance

    def collect(self):
        step = self._in_flight[0]
        output = super().collect()
        rows = {row.seq_id: row for row in step.rows}
        drafted = [self._drafted(rows[each.seq_id], each) for each in output.rows]
        return replace(output, rows=tuple(drafted))

    def _drafted(self, row, verified):
        if self.distance is None:
            return verified
        written = [self._slots[self._slot(self._tables[row.seq_id], i)] for i in range(row.end)]
        context = [*written, *verified.token_ids]
        ahead = [context[-1], *self.continuation(context, 2)]
        return verified._replace(next_draft_token_ids=(ahead[1 + self.distance],))


HINTS = {
    0: None,
    1: "one position too far",
    -1: "repeats the token before",
    None: "logits are NaN or infinite",
}


@pytest.mark.parametrize("distance", HINTS)
def test_the_cause_follows_from_what_is_drafted_instead(
    tokenizer, tiny_model_dir, head_dir, distance
):
    target = DraftingTarget(CONFIG.block_size, distance)
    result = probe(tokenizer).measure(target)
    assert result.is_low == (distance != 0)
    assert (result.acceptance == 1) == (distance == 0)
    head = HeadConfig.from_directory(head_dir, ModelConfig.from_directory(tiny_model_dir))
    causes = likely_causes(result, head, "tiny")
    assert len(causes) == (distance != 0)
    assert all(HINTS[distance] in each for each in causes)


@pytest.mark.parametrize(
    ("num_positions", "acceptance", "is_low"),
    [(93, 0.34, True), (93, 0.36, False), (12, 0.25, True), (15, 0.33, False), (12, 0.0, True)],
)
def test_few_positions_have_to_show_more(num_positions, acceptance, is_low):
    result = ProbeResult(num_positions, acceptance, 0.0, 0.0, 0.0)
    assert result.is_low == is_low
    assert result.is_sound != is_low


def test_causes_in_the_files(tiny_model_dir, head_dir):
    head = HeadConfig.from_directory(head_dir, ModelConfig.from_directory(tiny_model_dir))
    notes = ("config.json has no rope_theta: 10000 is assumed, the target has 500000",)
    head = replace(head, reading=replace(head.reading, target_name="org/Big", notes=notes))
    low = ProbeResult(96, 0.1, 0.0, 0.0, 0.0)
    mismatch = "its files name the target org/Big, and ./small is served"
    assert likely_causes(low, head, "./small") == (mismatch, *notes)
    assert likely_causes(low, head, "./models/big/") == notes
    assert likely_causes(low, head, "other/big@main") == notes


@pytest.mark.parametrize("is_random", [False, True])
def test_an_llm_warns_of_a_head_that_does_not_fit(
    tiny_model_dir, head_dir, random_dir, caplog, is_random
):
    directory = random_dir if is_random else head_dir
    keys = {"method": "medusa", "model": str(directory), "policy": "threshold"}
    with (
        caplog.at_level(logging.INFO, "specdec.engine.engine_setup"),
        LLM(**arguments(tiny_model_dir, speculative_config=keys)) as llm,
    ):
        acceptance = metrics_of(llm)["speculation_head_probe_acceptance"]
    [record] = [each for each in caplog.records if "draft head" in each.getMessage()]
    message = record.getMessage()
    assert f"{acceptance:.0%} of the first draft tokens are those of the target (93 pos" in message
    assert (record.levelno == logging.WARNING) == is_random == (acceptance < 0.4)
    assert (", which is low; it may belong to another target" in message) == is_random
    assert ("taken for Medusa (vLLM): 5 heads" in message) == is_random


def warning_of(target_dir, head_dir, caplog):
    """Return what an LLM with Medusa heads warns of at its start."""
    keys = {"method": "medusa", "model": str(head_dir), "policy": "threshold"}
    with (
        caplog.at_level(logging.WARNING, "specdec.engine.engine_setup"),
        LLM(**arguments(target_dir, speculative_config=keys)),
    ):
        [record] = [each for each in caplog.records if "draft head" in each.getMessage()]
    return record.getMessage()


def test_an_llm_warns_of_a_target_with_nan(tiny_model_dir, head_dir, tmp_path, caplog):
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, "model.norm.weight")
    assert warning_of(tmp_path, head_dir, caplog) == (
        "draft head: not probed: the target cannot continue a text: generation stopped after 0 "
        "output tokens: the model produced NaN or Inf logits"
    )


def test_an_llm_warns_of_some_nan_of_a_head(tiny_model_dir, head_dir, caplog, monkeypatch):
    result = ProbeResult(93, 0.9, 0.0, 0.0, 2 / 93)
    monkeypatch.setattr(HeadProbe, "measure", lambda self, target: result)
    words = "(93 positions); its logits are NaN or infinite at 2% of the positions. The head was"
    assert words in warning_of(tiny_model_dir, head_dir, caplog)


def test_no_probe_without_a_head(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir)) as llm:
        assert "speculation_head_probe_acceptance" not in metrics_of(llm)
