"""Every parameter in the real engine, with drafts, against the definition at each position.

Output is right when each token is the one that the definition gives after the tokens before it.
transformers computes the logits, `tests.specdec.plain` applies the rules.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.requests.sampling_resolver import resolve
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec import plain
from tests.specdec.engines import draft_model, engine_config, local_engine, run
from tests.specdec.fakes import run_ranks

NUM_TOKENS = 18
WARM = {"temperature": 0.7}
HOT = {"temperature": 1.5}
END = 2  # of the tiny model

PARAMETERS = {
    "temperature 0": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top_k": {**HOT, "top_k": 3},
    "top_p": {**HOT, "top_p": 0.5},
    "min_p": {**HOT, "min_p": 0.3},
    "top_k, top_p and min_p": {**HOT, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "repetition_penalty": {**WARM, "repetition_penalty": 1.2},
    "repetition_penalty below 1": {**WARM, "repetition_penalty": 0.8},
    "presence_penalty": {**WARM, "presence_penalty": 1.5},
    "frequency_penalty": {**WARM, "frequency_penalty": 0.8},
    "negative penalties": {**WARM, "presence_penalty": -1.0, "frequency_penalty": -0.5},
    "logit_bias": {**WARM, "logit_bias": {5: 4.0, 9: -100.0, 70: 5.0}},
    "allowed_token_ids": {**WARM, "allowed_token_ids": (70, 72, 80, 83, 84)},
    "bad_words": {**WARM, "bad_words": ("t", "ar", "the", " a", "s", "n")},
    "min_tokens": {**WARM, "min_tokens": 15, "logit_bias": {END: 10.0}, "ignore_eos": False},
    "stop_token_ids": {**WARM, "min_tokens": 16, "stop_token_ids": (70, 83)},
    "seed": {"temperature": 0.7, "seed": 12},
}
"""Each with values that make its effect visible."""

FEW = dict.fromkeys((END, 67, 70, 80, 83, 84), 30.0)
"""A bias towards few tokens, so that lookups are often right; some are in PARAMETERS."""


def prompt(index, length=24):
    generator = torch.Generator().manual_seed(index)
    piece = torch.randint(3, 383, (6,), generator=generator).tolist()
    return tuple((piece * length)[:length])


def asked(name, index=0, *, length=24, **params):
    values = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    values.setdefault("seed", 7 + index)
    return EngineRequest(
        prompt(index, length), SamplingParams(**values), request_id=name, seed=values["seed"]
    )


def with_few_tokens(name, params):
    bias = {
        token: value + params.get("logit_bias", {}).get(token, 0) for token, value in FEW.items()
    }
    return asked(f"{name}, few tokens", 1, **{**params, "logit_bias": bias})


class Definition:
    """Reference for each token of a request."""

    def __init__(self, directory):
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.config = ModelConfig.from_directory(directory)
        self.tokenizer = Tokenizer(directory)
        self._found_right = set()

    def rules(self, request):
        return resolve(request.params, request.seed, self.config, self.tokenizer)

    def rows(self, request, token_ids):
        """Yield the logits, the prompt and the output before each token."""
        known = request.prompt_token_ids
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*known, *token_ids]])).logits[0]
        for place in range(len(token_ids)):
            yield logits[len(known) - 1 + place], known, token_ids[:place]

    def check(self, request, token_ids):
        """Assert that the tokens are right; skip output that was checked before."""
        key = (request.request_id, repr(vars(request)), tuple(token_ids))
        if key not in self._found_right:
            self._check(request, token_ids)
            self._found_right.add(key)

    def _check(self, request, token_ids):
        rules = self.rules(request)
        assert token_ids
        for token, (logits, *context) in zip(token_ids, self.rows(request, token_ids), strict=True):
            assert plain.may_be_next(token, logits, rules, *context), (request, context)

    def differs_without(self, request, token_ids, **neutral):
        """Return whether some token would differ under rules with `neutral` values."""
        rules = replace(self.rules(request), **neutral)
        return any(
            token != plain.next_token(logits, rules, *context)
            for token, (logits, *context) in zip(
                token_ids, self.rows(request, token_ids), strict=True
            )
        )


@pytest.fixture(scope="module")
def definition(tiny_model_dir):
    return Definition(tiny_model_dir)


def engine_with(directory, method, num_draft_tokens, group=None, **changes):
    if method == "draft_model":
        speculation = SpeculativeConfig.of("draft_model", num_draft_tokens)
        config = engine_config(speculation=speculation, **changes)
        return local_engine(directory, config, group, draft_model(directory, group))
    return local_engine(directory, engine_config(num_draft_tokens, **changes), group)


@pytest.fixture(scope="module")
def generated(tiny_model_dir):
    """Return the output for all parameters in one batch, by drafting method."""
    requests = [
        each
        for name, params in PARAMETERS.items()
        for each in (asked(name, **params), with_few_tokens(name, params))
    ]

    @cache
    def generated(method, num_draft_tokens, num_ranks=1):
        def of_rank(group):
            engine = engine_with(tiny_model_dir, method, num_draft_tokens, group)
            return run(engine, requests)

        ranks = run_ranks(num_ranks, of_rank)
        assert all(texts(rank) == texts(ranks[0]) for rank in ranks), "ranks disagree"
        return {each.request_id: (each, ranks[0][each.request_id]) for each in requests}

    return generated


def texts(transcripts):
    return {name: each.token_ids for name, each in transcripts.items()}


METHODS = [(method, k) for method in ("ngram", "draft_model") for k in (1, 3, 5)]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("method", "k"), METHODS)
def test_each_token_matches_the_definition(definition, generated, method, k, name):
    for key in (name, f"{name}, few tokens"):
        request, transcript = generated(method, k)[key]
        definition.check(request, transcript.token_ids)
    counts = transcript.last.speculation
    assert counts.num_accepted_tokens > 0
    if method == "draft_model":
        # The draft model is the target with the same rules, so it is nearly always right.
        least = 0.9 * counts.num_draft_tokens - k  # drafts beyond the end of the text are not kept
        assert counts.num_accepted_tokens >= least


NEUTRAL = {
    "temperature": {"temperature": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.0},
    "repetition_penalty below 1": {"repetition_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 0.0},
    "frequency_penalty": {"frequency_penalty": 0.0},
    "logit_bias": {"logit_bias": ()},
    "allowed_token_ids": {"allowed_token_ids": None},
    "bad_words": {"bad_words": ()},
    "min_tokens": {"min_tokens": 0},
    "stop_token_ids": {"min_tokens": 0},
    "seed": {"seed": 0},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_each_parameter_changes_some_token(definition, generated, name):
    """The test above relies on it: without the parameter other tokens would be right."""
    shown = [generated("ngram", 1)[key] for key in (name, f"{name}, few tokens")]
    assert any(
        definition.differs_without(request, transcript.token_ids, **NEUTRAL[name])
        for request, transcript in shown
    )


def test_vocabulary_parallel_ranks_generate_the_same_tokens(generated):
    alone, shared = generated("draft_model", 3), generated("draft_model", 3, 2)
    for name, (_, transcript) in alone.items():
        assert shared[name][1].token_ids == transcript.token_ids


TOKENS = st.integers(3, 382)
MIXES = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.6, 1.0, 1.5]), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "top_k": st.integers(1, 50),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-20, 20), max_size=6),
        "allowed_token_ids": st.lists(TOKENS, min_size=3, max_size=60).map(tuple),
        "bad_words": st.lists(st.sampled_from(["e", "a", " the", "river", "er", "st"])).map(tuple),
        "min_tokens": st.integers(0, 12),
        "logprobs": st.integers(0, 3),
    },
)


BATCHES = given(
    st.lists(MIXES, min_size=2, max_size=5),
    st.sampled_from(["ngram", "draft_model"]),
    st.sampled_from([1, 3, 5]),
)


def check_mixes(directory, definition, mixes, method, k):
    requests = [asked(f"r{i}", i, **{"max_tokens": 12, **params}) for i, params in enumerate(mixes)]
    transcripts = run(engine_with(directory, method, k), requests)
    for each in requests:
        definition.check(each, transcripts[each.request_id].token_ids)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@BATCHES
def test_mixed_parameters_in_one_batch(tiny_model_dir, definition, mixes, method, k):
    check_mixes(tiny_model_dir, definition, mixes, method, k)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@BATCHES
def test_many_mixed_parameters(tiny_model_dir, definition, mixes, method, k):
    check_mixes(tiny_model_dir, definition, mixes, method, k)


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"frequency_penalty": 0.6, "repetition_penalty": 0.8, "temperature": 0.0},
    {"bad_words": ("e", "s"), "presence_penalty": -0.5, "top_p": 0.8},
]


@pytest.mark.parametrize(("method", "num_ranks"), [("ngram", 2), ("draft_model", 1)])
def test_penalties_through_preemption_chunks_and_cached_prefixes(
    tiny_model_dir, definition, method, num_ranks
):
    """Prompts longer than a chunk, and blocks for less than half of the requests."""
    requests = [
        with_few_tokens(f"r{i}", {"max_tokens": 30, "seed": i, **PENALTIES[i % len(PENALTIES)]})
        for i in range(4)
    ] + [asked(f"s{i}", 8, length=40, seed=i, **PENALTIES[i]) for i in range(4)]

    def of_rank(group):
        limits = {"num_blocks": 42, "max_num_batched_tokens": 24}
        engine = engine_with(tiny_model_dir, method, 3, group, **limits)
        return run(engine, requests), engine.stats()

    (transcripts, stats), *others = run_ranks(num_ranks, of_rank)
    assert all(texts(other) == texts(transcripts) for other, _ in others), "ranks disagree"
    for each in requests:
        definition.check(each, transcripts[each.request_id].token_ids)
    assert stats.counts.num_preemptions > 0
    assert stats.counts.num_cached_tokens > 0
    assert stats.counts.num_prefill_chunks > 0
    assert stats.counts.speculation.num_accepted_tokens > 0
