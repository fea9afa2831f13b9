"""Parallel drafting (PARD) through the real engine, against an independent reference.

`test_head_matrix.py` has every length, batch and size.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.config.model_config import ModelConfig
from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, gumbel_noise
from specdec.speculation.proposers import DraftModelProposer, make_proposer
from specdec.types.draft_messages import DraftedRow, DraftOutput
from specdec.types.errors import UnsupportedModelError
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.speculation.proposers.sequences import drafts, sequence
from tests.specdec.tiny import disturbed_llama_dir

MASK = 381


@pytest.fixture(scope="module")
def pard_dir(tiny_model_dir, tmp_path_factory):
    """Return the target with noise and a mask token, which it was never trained on."""
    directory = disturbed_llama_dir(tiny_model_dir, tmp_path_factory.mktemp("pard"))
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": MASK}))
    return directory


def parallel_model(directory, group=None, **changes):
    return draft_model(directory, group, parallel_drafting=True, **changes)


def requests(count=8, **params):
    prompts = [[(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * i) for i in range(count)]
    return [request(f"r{i}", prompt, seed=i, **params) for i, prompt in enumerate(prompts)]


@cache
def reference_tokens(directory, temperature):
    return tokens_by(local_engine(directory, engine_config(0)), requests(temperature=temperature))


def reference_drafts(model, text, num_prompt, k, temperature, seed):
    """Draft by the paper: one pass over the text and k - 1 masks, the logits of the last k."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*text, *[MASK] * (k - 1)]])).logits[0, -k:]
    if temperature == 0:
        return logits.argmax(1).tolist()
    chunks = torch.arange(-(-logits.shape[1] // CHUNK_TOKENS))
    made = []
    for place, row in enumerate(logits):
        position = torch.full_like(chunks, len(text) - num_prompt + place)
        keys = NoiseKeys(torch.full_like(chunks, seed), torch.zeros_like(chunks), position)
        noise = gumbel_noise(keys, chunks).flatten()[: len(row)]
        made.append(int((row / temperature + noise).argmax()))
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 4])
def test_drafts_are_those_of_one_pass_over_masks(tiny_model_dir, pard_dir, temperature, k):
    """In every step, so also after accepted drafts, whose places held masks before."""
    model = LlamaForCausalLM.from_pretrained(pard_dir, dtype=torch.float32).eval()
    engine = local_engine(tiny_model_dir, engine_config(k), proposer=parallel_model(pard_dir))
    target, num_compared = engine._steps.target, 0
    begin, texts = target.begin, {}

    def checking_begin(step):
        nonlocal num_compared
        for row in step.rows:
            text = texts.setdefault(row.seq_id, [])
            text[row.num_computed_tokens :] = row.token_ids  # the drafts may be accepted
            if row.num_draft_tokens:
                num_prompt = 12 + 12 * row.seq_id
                known, seed = text[: row.known_end], row.seq_id
                expected = reference_drafts(model, known, num_prompt, k, temperature, seed)
                assert list(row.drafts) == expected[: row.num_draft_tokens]
                num_compared += 1
        begin(step)

    target.begin = checking_begin
    run(engine, requests(3, temperature=temperature))
    assert num_compared > 20
    assert engine.stats().counts.accepted_by_position[0] > 5


def check(directory, pard, temperature, k, group=None):
    proposer = parallel_model(pard, group, max_model_len=90)
    config = engine_config(k, num_blocks=60)
    engine = local_engine(directory, config, group, proposer)
    asked = requests(temperature=temperature)
    for order in (1, -1):
        expected = reference_tokens(directory, temperature)
        assert tokens_by(engine, asked[::order]) == expected
    counts = engine.stats().counts
    assert counts.num_prefill_chunks > 0
    assert counts.num_cached_tokens > 0
    assert counts.num_preemptions > 0
    assert counts.speculation.num_accepted_tokens > 0
    assert k == 1 or counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens
    proposer.check_integrity()


@pytest.mark.parametrize(("temperature", "k"), [(0.8, 3), (0.0, 5)])
def test_tokens_are_those_without_speculation(tiny_model_dir, pard_dir, temperature, k):
    check(tiny_model_dir, pard_dir, temperature, k)


def test_two_ranks_agree(tiny_model_dir, pard_dir):
    reference_tokens(tiny_model_dir, 0.8)
    run_ranks(2, lambda group: check(tiny_model_dir, pard_dir, 0.8, 3, group))


def test_the_longest_draft_needs_no_catching_up():
    """With all 32 draft tokens accepted the next draft begins with 33 tokens without KV."""

    class Worker:
        poll_busy = lambda self: False  # noqa: E731

        def begin(self, step):
            self.step = step

        def collect(self):
            rows = [DraftedRow(row.seq_id, (7,) * row.num_draft_tokens) for row in self.step.drafts]
            return DraftOutput(self.step.step_id, tuple(rows))

    worker = Worker()
    limits = DraftLimits(
        num_blocks=60,
        block_size=4,
        max_model_len=200,
        max_catch_up_tokens=64,
        parallel_drafting=True,
    )
    proposer = DraftModelProposer(worker, limits)
    seq = sequence(1, [5, 6, 7])
    for num_pending in (3, 33, 33):
        assert drafts(proposer, seq, count=32) == [(7,) * 32]
        [row] = worker.step.drafts
        assert (len(row.token_ids), worker.step.rows) == (num_pending, ())
        assert row.num_computed_tokens + num_pending == seq.num_tokens
        seq.token_ids += [7] * 33
    proposer.check_integrity()


def test_penalties_and_grammars_apply_place_by_place(tiny_model_dir, pard_dir):
    engine = local_engine(tiny_model_dir, engine_config(4), proposer=parallel_model(pard_dir))
    plain = local_engine(tiny_model_dir, engine_config(0))
    compiler = grammar_compiler(tiny_model_dir)
    spec = StructuredOutput(regex="[a-f]{30}")
    structured = [
        replace(each, grammar=compiler.compile(spec))
        for each in requests(4, structured_output=spec, temperature=0.8)
    ]
    for asked in (
        structured,
        requests(4, frequency_penalty=1.5, temperature=0.8),
        requests(4, bad_words=("e",), repetition_penalty=1.3),
    ):
        assert tokens_by(engine, asked) == tokens_by(plain, asked)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "confidence"])
def test_probabilities_travel_with_parallel_drafts(tiny_model_dir, pard_dir, verifier):
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=parallel_model(pard_dir))
    speculation = SpeculationOptions(verifier=verifier, acceptance_threshold=0.01)
    run(engine, requests(4, temperature=0.8, speculation=speculation))
    counts = engine.stats().counts.speculation
    assert counts.num_accepted_tokens > 0
    assert verifier != "confidence" or counts.acceptance_rate > 0.5


def test_a_lookup_before_a_parallel_draft_model(tiny_model_dir, pard_dir):
    speculation = SpeculativeConfig.of("draft_model", first="ngram", parallel_drafting=True)
    proposer = make_proposer(speculation, parallel_model(pard_dir))
    config = engine_config(speculation=speculation)
    engine = local_engine(tiny_model_dir, config, proposer=proposer)
    assert tokens_by(engine, requests()) == reference_tokens(tiny_model_dir, 0.0)


@pytest.mark.parametrize("token", [383, -1, "x", True])
def test_a_mask_token_outside_the_vocabulary_is_refused(pard_dir, tmp_path, token):
    raw = {**json.loads((pard_dir / "config.json").read_text()), "pard_token": token}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="pard_token"):
        ModelConfig.from_directory(tmp_path)
