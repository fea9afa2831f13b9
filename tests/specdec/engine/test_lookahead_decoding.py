"""The real engine with lookahead tokens in its rows: they are scored, and change no token.

test_methods.py tests that batching does not change tokens either.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposal
from specdec.types.control import SpeculationControl
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engines import HashTarget, engine_config, local_engine, make_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.models.passes import weights_of
from tests.specdec.tiny import tiny_llama_dir

WINDOW = 7
PROMPT = [(5 + 7 * place) % 380 for place in range(20)]
SHAPED = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.8},
    {"presence_penalty": 1.0, "bad_words": (), "logit_bias": {20: 3.0}, "temperature": 0.0},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 0.8, "logprobs": 2},
]


def lookahead(k=3, **keys):
    keys = {"lookahead_window_size": WINDOW, **keys}
    return SpeculativeConfig.of("lookahead", num_speculative_tokens=k, **keys)


class Successor(HashTarget):
    """Yields each token plus one, so that the text never repeats itself."""

    def next_token(self, context):
        return (context[-1] + 1) % 70


def engine_on(directory, target, speculation, policy=None, **changes):
    config = engine_config(speculation=speculation, **changes)
    return make_engine(directory, config, target, policy=policy)


def test_lookahead_decoding_speeds_up_text_without_repetition(tiny_model_dir):
    """No lookup in the text can draft it, only n-grams of the lookahead window."""
    num_steps = {}
    for speculation in (SpeculativeConfig.of("ngram"), lookahead()):
        engine = engine_on(tiny_model_dir, Successor(4, 383), speculation)
        generated = run(engine, [request("r", [3, 30, 50], max_tokens=60)])["r"].token_ids
        assert generated == [(51 + index) % 70 for index in range(60)]
        num_steps[speculation.method] = engine.stats().counts.num_steps
    assert num_steps["ngram"] == 60
    assert num_steps["lookahead"] < 40


def rows_of(target):
    return [row for step in target.steps for row in step.rows]


@pytest.mark.parametrize("max_num_batched_tokens", [8, 20, 64])
def test_lookahead_tokens_respect_the_budgets(tiny_model_dir, max_num_batched_tokens):
    target = HashTarget(4, 383)
    engine = engine_on(
        tiny_model_dir, target, lookahead(), max_num_batched_tokens=max_num_batched_tokens
    )
    requests = [request(f"r{i}", PROMPT[i:], max_tokens=30) for i in range(6)]
    for each, generated in zip(requests, run(engine, requests).values(), strict=True):
        assert generated.token_ids == target.continuation(each.prompt_token_ids, 30)
    assert max(row.num_lookahead_tokens for row in rows_of(target)) <= WINDOW
    counted = engine.stats().counts.num_lookahead_tokens
    assert counted == sum(row.num_lookahead_tokens for row in rows_of(target))
    assert any(row.num_lookahead_tokens for row in rows_of(target)) == (max_num_batched_tokens > 8)
    for step in target.steps:
        num_guesses = sum(len(row.guesses) for row in step.rows)
        num_decoding = sum(row.num_known_tokens == 1 for row in step.rows)
        assert sum(len(row.token_ids) for row in step.rows) <= max_num_batched_tokens
        assert num_guesses <= (max_num_batched_tokens - num_decoding) // 2 + 1


def test_no_guess_exceeds_the_length_limits(tiny_model_dir):
    target = HashTarget(4, 383)
    engine = engine_on(tiny_model_dir, target, lookahead(), max_model_len=40)
    run(engine, [request("r", PROMPT, max_tokens=9), request("long", PROMPT, max_tokens=None)])
    lengths = {row.seq_id: row.end for row in rows_of(target)}
    assert lengths == {0: len(PROMPT) + 8, 1: 39}


def test_off_runs_no_lookahead_token(tiny_model_dir):
    target = HashTarget(4, 383)
    policy = SpeculationPolicy(SpeculationControl("off", 32, 3), clock=lambda: 0.0)
    engine = engine_on(tiny_model_dir, target, lookahead(), policy)
    run(engine, [request("off", PROMPT)])
    engine.set_speculation(SpeculationControl("on", 32, 3))
    for options in (
        SpeculationOptions(enabled=False),
        SpeculationOptions(num_speculative_tokens=0),
    ):
        run(engine, [request("out", PROMPT, speculation=options)])
    assert not any(row.guesses for row in rows_of(target))
    run(engine, [request("on", PROMPT)])
    assert any(row.num_lookahead_tokens for row in rows_of(target))


def test_tokens_with_rules_and_grammars_are_those_without_lookahead(tiny_model_dir):
    compiler = grammar_compiler(tiny_model_dir)
    spec = StructuredOutput(regex="(the|a) (river|bridge) is [a-z]{2,8} and [0-9]{1,3}")
    requests = [
        request(f"r{index}", PROMPT * 2, seed=index, max_tokens=30, **params)
        for index, params in enumerate(SHAPED)
    ]
    constrained = request("grammar", PROMPT, structured_output=spec, temperature=0.8)
    requests.append(replace(constrained, grammar=compiler.compile(spec)))
    plain = run(local_engine(tiny_model_dir, engine_config(0)), requests)
    engine = local_engine(tiny_model_dir, engine_config(speculation=lookahead()))
    for name, generated in run(engine, requests).items():
        assert generated.token_ids == plain[name].token_ids
        for ours, theirs in zip(_joined(generated), _joined(plain[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert engine.stats().counts.speculation.num_drafts > 0


def _joined(transcript):
    return [row for part in transcript.logprobs for row in part.logprobs]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_verified_rows_are_unaffected_and_guesses_are_scored(tiny_model_dir, num_ranks):
    """The score of a guess is the greedy token of a pass over the same text."""
    drafts, window = (7, 8), (30, 40, 50)
    shaped = SamplingRules(temperature=0.0, logit_bias=((12, 100.0),))

    def executed(group, row, rules):
        config = engine_config(0)
        runner = load_target(RankModel(tiny_model_dir, "float32", config), group)
        admission = SequenceAdmission(1, len(PROMPT), rules, tuple(PROMPT))
        table = BlockTableDelta(1, 0, tuple(range(20)))
        [verified] = runner.execute(StepInput(0, (), (admission,), (table,), (row,))).rows
        return verified

    def of_rank(group):
        both = StepRow(1, 0, (*PROMPT, *drafts, *window), 2, True, num_lookahead_tokens=3)
        without = StepRow(1, 0, (*PROMPT, *drafts), 2, True)
        with_it = executed(group, both, shaped)
        assert with_it.token_ids == executed(group, without, shaped).token_ids == (12,)
        expected = []
        for end in range(1, 6):
            text = (*PROMPT, *(drafts + window)[:end])
            [token] = executed(group, StepRow(1, 0, text, 0, True), SamplingRules(0.0)).token_ids
            expected.append(token)
        assert with_it.lookahead_token_ids == tuple(expected)

    run_ranks(num_ranks, of_rank)


class Poisoner:
    """Proposes lookahead tokens whose embedding is NaN."""

    def take(self, requests):
        return [
            Proposal(
                each.seq.seq_id,
                each.seq.num_tokens,
                each.seq.token_ids[-1],
                (),
                lookahead_token_ids=(300,) * each.max_lookahead_tokens,
            )
            for each in requests
        ]

    def ahead(self, rows):
        pass

    def end_step(self, *, is_lost=False):
        pass

    def release(self, seq_id):
        del seq_id


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_guess_cannot_end_a_request(tmp_path, kernels):
    """Untied, because a NaN in a tied embedding would be in the logits of every row."""
    directory = tiny_llama_dir(tmp_path, tied=False)
    requests = [request(f"r{i}", PROMPT[i:], logit_bias={300: -100.0}) for i in range(3)]
    config = engine_config(speculation=lookahead())
    group = TensorParallelGroup()
    runner = load_target(RankModel(directory, "float32", config, kernels=kernels), group)
    plain = run(make_engine(directory, engine_config(0), LocalTarget(runner)), requests)
    weights_of(runner.model).embed_tokens.weight[300] = torch.nan
    engine = make_engine(directory, config, LocalTarget(runner), Poisoner())
    for name, generated in run(engine, requests).items():
        assert (generated.token_ids, generated.error) == (plain[name].token_ids, None)
