# Modules: specdec.worker.batch.prompt_outputs
"""Log-probabilities through the real engine, against transformers and against no speculation."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sampling import logprobs as logprobs_module
from specdec.types.messages import Logprobs
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks

TOLERANCE = 1e-4
NUM_TOKENS = 20
PIECE = [17, 99, 230, 45, 300, 8]
FEW = {"logit_bias": dict.fromkeys((67, 70, 80, 83, 84), 30.0)}  # so that lookups are right
SHAPED = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def log_probs(tiny_model_dir):
    """Return a function to the log-probabilities after each token, [len(token_ids), vocab_size]."""
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    def log_probs(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(1)

    return log_probs


def check(logprobs: Logprobs, token_ids, expected, num_best, given=()):
    """Check generated token_ids; expected: [len(token_ids), vocab_size]."""
    assert len(logprobs) == len(token_ids)
    assert logprobs.num_given == len(given)
    best = expected.topk(num_best, dim=1).indices.tolist()
    listed = [[own, *row, *given] for own, row in zip(token_ids, best, strict=True)]
    assert logprobs.token_ids.shape == (len(listed), 1 + num_best + len(given))
    assert logprobs.token_ids.tolist() == listed
    values = expected.gather(1, torch.from_numpy(logprobs.token_ids).long())
    assert np.abs(logprobs.logprobs - values.numpy()).max(initial=0) < TOLERANCE
    own = expected.gather(1, torch.tensor(list(token_ids)).view(-1, 1))
    assert logprobs.ranks.tolist() == (1 + (expected > own).sum(1)).tolist()


def engine_for(directory, drafts, group=None, **changes):
    if drafts == "draft_model":
        config = engine_config(speculation=SpeculativeConfig.of("draft_model", 3), **changes)
        return local_engine(directory, config, group, draft_model(directory, group))
    return local_engine(directory, engine_config(drafts, **changes), group)


def asked(count=5):
    """Return requests with different numbers of logprobs, and without."""
    return [
        request(
            f"r{i}",
            (PIECE * 6)[: 12 + 5 * i],
            seed=i,
            max_tokens=NUM_TOKENS,
            logprobs=[3, None, 0, 5, 1][i],
            **FEW,
            **(SHAPED if i % 2 else {}),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3, "draft_model"])
def test_each_generated_token_has_logprobs(tiny_model_dir, log_probs, drafts, num_ranks):
    def of_rank(group):
        return run(engine_for(tiny_model_dir, drafts, group), asked())

    transcripts = run_ranks(num_ranks, of_rank)[0]
    for each in asked():
        generated, num_best = transcripts[each.request_id], each.params.logprobs
        if num_best is None:
            assert generated.logprobs == []
            continue
        prompt = each.prompt_token_ids
        expected = log_probs([*prompt, *generated.token_ids])[len(prompt) - 1 : -1]
        check(Logprobs.join(generated.logprobs), generated.token_ids, expected, num_best)


def test_speculation_changes_logprobs_only_by_rounding(tiny_model_dir):
    plain = run(engine_for(tiny_model_dir, 0), asked())
    for drafts in (1, 5, "draft_model"):
        engine = engine_for(tiny_model_dir, drafts)
        transcripts = run(engine, asked())
        assert engine.stats().counts.speculation.num_accepted_tokens > 0
        for name, generated in transcripts.items():
            assert generated.token_ids == plain[name].token_ids
            if generated.logprobs:
                ours, others = (
                    Logprobs.join(generated.logprobs),
                    Logprobs.join(plain[name].logprobs),
                )
                assert len(ours) == len(generated.token_ids) == NUM_TOKENS
                assert np.array_equal(ours.token_ids, others.token_ids)
                assert np.abs(ours.logprobs - others.logprobs).max() < TOLERANCE
                assert np.array_equal(ours.ranks, others.ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_without_logprobs_are_unaffected_by_requests_with_them(
    tiny_model_dir, drafts, num_ranks
):
    """A batch whose rows are all greedy is verified by a shorter path."""
    quiet = [request(f"r{i}", PIECE * (2 + i), max_tokens=NUM_TOKENS) for i in range(3)]
    curious = request("curious", PIECE * 3, max_tokens=NUM_TOKENS, logprobs=1, **SHAPED)

    def of_rank(group):
        alone = run(engine_for(tiny_model_dir, drafts, group), quiet)
        return alone, run(engine_for(tiny_model_dir, drafts, group), [*quiet, curious])

    alone, beside = run_ranks(num_ranks, of_rank)[0]
    for each in quiet:
        assert alone[each.request_id].token_ids == beside[each.request_id].token_ids


def test_tokens_after_the_end_have_no_logprobs(tiny_model_dir):
    """The last output and its log-probabilities are cut where the text ends."""
    engine = engine_for(tiny_model_dir, "draft_model")
    bias = {2: 12.0}  # the end, soon
    params = {"ignore_eos": False, "temperature": 1.0, "logit_bias": bias, "logprobs": 2}
    generated = run(engine, [request(f"r{i}", PIECE * 4, seed=i, **params) for i in range(6)])
    for transcript in generated.values():
        assert len(Logprobs.join(transcript.logprobs)) == len(transcript.token_ids)
    assert {each.token_ids[-1] for each in generated.values()} == {2}


GIVEN = ((382, 0, 191), (7,), (), (0, 200, 200, 5))


def listing():
    """Return requests that name tokens for their log-probabilities, and one that does not."""
    return [
        request(
            f"r{i}",
            (PIECE * 6)[: 12 + 5 * i],
            seed=i,
            max_tokens=NUM_TOKENS,
            logprobs=[2, None, 1, 0][i],
            prompt_logprobs=[None, 3, 0, 0][i],
            logprob_token_ids=given,
            **FEW,
            **(SHAPED if i % 2 else {}),
        )
        for i, given in enumerate(GIVEN)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3, "draft_model"])
def test_given_tokens_have_logprobs_at_each_position(tiny_model_dir, log_probs, drafts, num_ranks):
    """The given tokens are of both ranks. Requests with fewer of them are in the same batch."""

    def of_rank(group):
        engine = engine_for(tiny_model_dir, drafts, group)
        return run(engine, listing()), engine.stats().counts.speculation

    transcripts, speculation = run_ranks(num_ranks, of_rank)[0]
    assert bool(speculation.num_accepted_tokens) == bool(drafts)
    for each in listing():
        params, prompt = each.params, each.prompt_token_ids
        generated = transcripts[each.request_id]
        expected, given = log_probs([*prompt, *generated.token_ids]), params.logprob_token_ids
        after = expected[len(prompt) - 1 : -1]
        logprobs = Logprobs.join(generated.logprobs)
        check(logprobs, generated.token_ids, after, params.logprobs, given)
        if params.prompt_logprobs is not None:
            before = expected[: len(prompt) - 1]
            found = prompt_logprobs_of(generated)
            check(found, prompt[1:], before, params.prompt_logprobs, given)


def prompt_logprobs_of(transcript) -> Logprobs:
    [prompt_logprobs] = transcript.prompt_logprobs
    return prompt_logprobs


@pytest.mark.parametrize(("num_ranks", "slab"), [(1, 1), (1, 2**24), (3, 5 * 383)])
def test_prompt_logprobs_are_those_of_transformers(
    tiny_model_dir, log_probs, num_ranks, slab, monkeypatch
):
    monkeypatch.setattr(logprobs_module, "SLAB_LOGITS", slab)
    lengths = [1, 2, 15, 16, 17, 70]  # chunks have 16 tokens
    requests = [
        request(f"r{n}", (PIECE * 12)[:n], prompt_logprobs=n % 4, max_tokens=3) for n in lengths
    ]

    def of_rank(group):
        config = {"max_num_batched_tokens": 16}
        return run(engine_for(tiny_model_dir, 3, group, **config), requests)

    transcripts = run_ranks(num_ranks, of_rank)[0]
    for each in requests:
        prompt, num_best = each.prompt_token_ids, each.params.prompt_logprobs
        expected = log_probs(prompt)[:-1]
        check(prompt_logprobs_of(transcripts[each.request_id]), prompt[1:], expected, num_best)


def test_cached_prefixes_are_recomputed_only_for_prompt_logprobs(tiny_model_dir, log_probs):
    engine = engine_for(tiny_model_dir, 0)
    prompt = PIECE * 5
    run(engine, [request("first", prompt, max_tokens=1)])
    generated = run(engine, [request("asks", prompt, prompt_logprobs=1, max_tokens=8)])["asks"]
    assert engine.stats().counts.num_cached_tokens == 0
    check(prompt_logprobs_of(generated), prompt[1:], log_probs(prompt)[:-1], 1)
    run(engine, [request("does not", prompt, max_tokens=1)])
    assert engine.stats().counts.num_cached_tokens > 0


def test_prompt_logprobs_are_sent_once_despite_preemption(tiny_model_dir, log_probs):
    """Some are preempted before their first token, some after it. No two tokens nearly tie."""
    config = {"num_blocks": 44, "max_num_batched_tokens": 16}
    engine = engine_for(tiny_model_dir, 3, **config)
    prompts = {f"r{i}": [3 + (13 * i + 17 * j) % 380 for j in range(50 + i)] for i in range(6)}
    requests = [
        request(name, prompt, prompt_logprobs=2, logprobs=0, max_tokens=30)
        for name, prompt in prompts.items()
    ]
    transcripts = run(engine, requests)
    assert engine.stats().counts.num_preemptions > 0
    for name, prompt in prompts.items():
        check(prompt_logprobs_of(transcripts[name]), prompt[1:], log_probs(prompt)[:-1], 2)
        assert len(Logprobs.join(transcripts[name].logprobs)) == 30
