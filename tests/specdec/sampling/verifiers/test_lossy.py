import math

import numpy as np
import pytest
import torch

from specdec.sampling.verifiers import Draft
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import DraftProbs
from specdec.types.sampling.sampling_spec import Verifier
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, verified_by

VOCAB_SIZE = 8
PROBS = [0.5, 0.25, 0.125, 0.0625, 0.0625, 0, 0, 0]  # entropy 1.875 bits
ENTROPY = 1.875 * math.log(2)


def verify(verifier, logits, drafts, *, temperature=1.0, seed=0, shard=None, **params):
    """Verify drafts; verifier: one for all drafts, or one for each."""
    verifiers = verifier if isinstance(verifier, list) else [verifier] * len(drafts)
    lengths = torch.tensor([len(draft) + 1 for draft in drafts])
    seeds = torch.arange(len(drafts)).repeat_interleave(lengths) + seed
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = sampling_batch(temperature, seeds, positions, **params)
    batch_drafts = [Draft(*each) for each in zip(drafts, verifiers, strict=True)]
    return verified_by(verifiers[0].name, logits, batch, batch_drafts, shard)


def coupled(logits, num_tokens, **options):
    """Return the coupled token of each row, which does not depend on drafts."""
    rows = [verify(Verifier(), logits[i : i + 1], [[]], **options) for i in range(num_tokens)]
    return [int(row.token_ids[0]) for row in rows]


def logits_of(num_rows):
    return torch.tensor(PROBS).log().repeat(num_rows, 1)


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.0, 5), (0.0624, 5), (0.0626, 3), (0.249, 2), (0.4, 1), (0.51, 0)],
)
def test_threshold_accepts_likely_tokens(threshold, kept):
    """Test each token alone; a token that the target samples itself is always kept."""
    drafts = [[token] for token in range(VOCAB_SIZE)]
    logits = logits_of(2 * VOCAB_SIZE)
    verified = verify(Verifier("threshold", threshold=threshold), logits, drafts)
    plain = verify(Verifier(), logits, drafts)
    for token in range(VOCAB_SIZE):
        accepted = bool(verified.num_accepted[token])
        assert accepted == (token < kept or bool(plain.num_accepted[token]))


@pytest.mark.parametrize(
    ("epsilon", "delta", "kept"),
    [
        (0.09, 0.3, 3),  # 0.3 exp(-H) = 0.082
        (0.3, 1.0, 1),  # exp(-H) = 0.273
        (0.2, 1.0, 2),
        (0.0, 1.0, 5),
        (1.0, 0.0, 5),
        (0.0626, 1.0, 3),
    ],
)
def test_typical_accepts_typical_tokens(epsilon, delta, kept):
    limit = min(epsilon, delta * math.exp(-ENTROPY))
    assert sum(prob > limit for prob in PROBS) == kept
    drafts = [[token] for token in range(VOCAB_SIZE)]
    logits = logits_of(2 * VOCAB_SIZE)
    verified = verify(Verifier("typical", epsilon=epsilon, delta=delta), logits, drafts)
    plain = verify(Verifier(), logits, drafts)
    for token in range(VOCAB_SIZE):
        accepted = bool(verified.num_accepted[token])
        assert accepted == (token < kept or bool(plain.num_accepted[token]))


def test_limits_are_per_sequence():
    verifiers = [Verifier("threshold", threshold=value) for value in (0.2, 0.6, 0.2)]
    logits = logits_of(9)
    verified = verify(verifiers, logits, [[1, 1], [1, 1, 1], [2]])
    assert verified.num_accepted[0] == 2
    assert verified.num_accepted[1] <= 3
    [first, *_] = coupled(logits, 1, seed=1)
    assert (verified.num_accepted[1] > 0) == (first == 1)


def test_the_coupled_token_follows_the_first_rejection():
    logits = random_logits(4, VOCAB_SIZE, spread=1.0, seed=2)
    for seed in range(30):
        plain = verify(Verifier(), logits, [[0, 1, 2]], seed=seed)
        strict = verify(Verifier("threshold", threshold=1.0), logits, [[0, 1, 2]], seed=seed)
        assert list(strict) == list(plain), "nothing but the target's own tokens is left"
        lossy = verify(Verifier("threshold", threshold=0.1), logits, [[0, 1, 2]], seed=seed)
        assert lossy.num_accepted[0] >= plain.num_accepted[0]
        if lossy.num_accepted[0] == 3:
            at_3 = sampling_batch(1.0, torch.tensor([seed]), torch.tensor([3]))
            last = verified_by("coupled", logits[3:], at_3, [Draft([])])
            assert lossy.token_ids[-1] == last.token_ids[0]


@pytest.mark.parametrize("name", ["typical", "threshold"])
def test_temperature_0_uses_probabilities_of_temperature_1(name):
    logits = logits_of(4)
    verified = verify(Verifier(name, threshold=0.2), logits, [[1, 1, 7]], temperature=0.0, top_k=1)
    assert list(verified) == [(1, 1, 0)]


@pytest.mark.parametrize("name", ["typical", "threshold"])
def test_impossible_tokens_are_never_accepted(name):
    verifier = Verifier(name, epsilon=0.0, delta=0.0, threshold=0.0)
    for draft in ([5], [4]):  # of probability 0, and truncated
        verified = verify(verifier, logits_of(2), [draft], top_k=2)
        assert verified.num_accepted.tolist() == [0]


@pytest.mark.parametrize("name", ["typical", "threshold"])
def test_sharded_ranks_equal_one_rank(name):
    verifier = Verifier(name, threshold=0.15)
    logits = random_logits(9, VOCAB_SIZE, spread=1.0, seed=4)
    drafts = [[1, 2, 3], [], [4, 5], []]

    def verified(group, temperature):
        held = group.share_of(VOCAB_SIZE)
        shard = VocabShard(group, held.start, VOCAB_SIZE)
        own = logits[:, held.start : held.stop]
        return list(verify(verifier, own, drafts, temperature=temperature, shard=shard))

    for temperature in (0.0, 0.8):
        expected = list(verify(verifier, logits, drafts, temperature=temperature))
        for size in (2, 3):
            ranks = run_ranks(size, lambda group: verified(group, temperature))  # noqa: B023
            assert ranks == [expected] * size


@pytest.mark.parametrize("name", ["typical", "threshold"])
def test_nan_logits_of_one_sequence_do_not_affect_others(name):
    logits = random_logits(6, VOCAB_SIZE, spread=1.0, seed=5)
    verifier = Verifier(name, threshold=0.1)
    good = list(verify(verifier, logits, [[1, 2], [3, 4]]))
    logits[:3] = torch.nan
    bad = list(verify(verifier, logits, [[1, 2], [3, 4]]))
    assert bad[1] == good[1]
    assert all(0 <= token < VOCAB_SIZE for token in bad[0])


def confident(drafts, confidences, threshold, *, temperature=1.0, **params):
    """Verify drafts by the draft's own probabilities; None: a draft without any."""
    count = sum(len(draft) + 1 for draft in drafts)
    seeds = torch.arange(len(drafts)).repeat_interleave(torch.tensor([len(d) + 1 for d in drafts]))
    positions = torch.cat([torch.arange(len(draft) + 1) for draft in drafts])
    batch = sampling_batch(temperature, seeds, positions, **params)
    verifier = Verifier("confidence", threshold=threshold)
    listed = [
        Draft(draft, verifier, None if own is None else draft_probs(draft, own))
        for draft, own in zip(drafts, confidences, strict=True)
    ]
    return verified_by("confidence", logits_of(count), batch, listed)


def draft_probs(draft, confidences):
    token_ids = np.array(draft, np.int32).reshape(-1, 1)
    return DraftProbs(token_ids, np.array(confidences, np.float32).reshape(-1, 1))


def test_confidence_accepts_what_the_draft_is_sure_of():
    drafts, confidences = [[4, 3, 4]] * 20, [[0.9, 0.6, 0.7]] * 20
    assert set(confident(drafts, confidences, 0.6).num_accepted.tolist()) == {3}
    strict = confident(drafts, confidences, 0.65)
    plain = verify(Verifier(), logits_of(80), drafts)
    for accepted, own in zip(strict.num_accepted, plain.num_accepted, strict=True):
        assert accepted == 1 or (accepted > 1 and own >= 0), "the second token is too unsure"
    assert (strict.num_accepted == 1).mean() > 0.7
    assert (strict.num_accepted >= 1).all()


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_drafts_without_probabilities_are_accepted_as_by_the_coupled_verifier(threshold):
    drafts = [[0, 1], [2, 0], [0, 0]] * 20
    own = confident(drafts, [None] * 60, threshold)
    assert list(own) == list(verify(Verifier(), logits_of(180), drafts))
    mixed = confident(drafts, [[1.0, 1.0], None, None] * 20, threshold)
    assert mixed.num_accepted[::3].tolist() == [2] * 20
    assert mixed.num_accepted[1::3].tolist() == own.num_accepted[1::3].tolist()


def test_confidence_never_accepts_what_the_request_rules_out():
    for draft in ([5], [4]):  # of probability 0, and truncated
        assert confident([draft], [[1.0]], 0.1, top_k=2).num_accepted.tolist() == [0]


def test_confidence_at_temperature_0():
    verified = confident([[1, 1, 7]], [[0.9, 0.9, 0.9]], 0.5, temperature=0.0)
    assert list(verified) == [(1, 1, 0)]
