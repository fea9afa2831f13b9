"""Reference tests: every parameter against a row-by-row definition and transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec.sampling.logits_processors import (
    BatchLogitsProcessor,
    LogitsProcessor,
    apply_token_masks,
)
from specdec.sampling.token_history import TokenHistory
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.types.sharding import partition
from tests.specdec import plain

VOCAB_SIZE = 70  # of words of 32 bits, the last one is not full

token = st.integers(0, VOCAB_SIZE - 1)
few_tokens = st.integers(0, 9)


@st.composite
def masks(draw):
    allowed = draw(st.lists(token, min_size=1, max_size=40))
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32)
    for each in allowed:
        mask[each // 32] |= np.uint32(1 << each % 32)
    return mask.view(np.int32)


rules = st.builds(
    SamplingRules,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.5]),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=5).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(
        st.lists(few_tokens, min_size=1, max_size=3).map(tuple), max_size=4, unique=True
    ).map(tuple),
    allowed_token_ids=st.none() | st.lists(token, min_size=1, max_size=30).map(tuple),
    min_tokens=st.integers(0, 4),
    end_token_ids=st.lists(token, max_size=3, unique=True).map(tuple),
)
rows = st.tuples(
    rules,
    st.lists(few_tokens, min_size=1, max_size=6),
    st.lists(few_tokens, max_size=6),
    st.none() | masks(),
)


def shaped(logits, batch, tokens=range(VOCAB_SIZE)):
    """Process all rows at once, for one rank's tokens."""
    edits = BatchLogitsProcessor(tokens)
    for row, (row_rules, prompt, output, mask) in enumerate(batch):
        history = None
        if row_rules.needs_tokens:
            history = TokenHistory([*prompt, *output], len(prompt))
        edits.add(row, LogitsProcessor.of(row_rules, tokens), len(output), history, mask)
    return edits.apply(logits[:, tokens.start : tokens.stop].clone()), edits


def random_logits(num_rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 99))
def test_mixed_batch_equals_the_reference_on_any_number_of_ranks(batch, num_ranks, seed):
    logits = random_logits(len(batch), seed)
    parts = [shaped(logits, batch, share) for share in partition(VOCAB_SIZE, num_ranks)]
    for row, (row_rules, prompt, output, mask) in enumerate(batch):
        expected = plain.shape(logits[row], row_rules, prompt, output, mask)
        actual = torch.cat([part[row] for part, _ in parts])
        torch.testing.assert_close(actual, expected)
    assert all(edits.rows == parts[0][1].rows for _, edits in parts)
    for row in set(range(len(batch))) - set(parts[0][1].rows):
        assert torch.equal(torch.cat([part[row] for part, _ in parts]), logits[row])


def test_rows_without_parameters_are_unchanged():
    logits = random_logits(2).bfloat16()
    neutral = SamplingRules(min_tokens=3, end_token_ids=(5,))
    edits = BatchLogitsProcessor(range(VOCAB_SIZE))
    for row in range(2):
        edits.add(row, LogitsProcessor.of(neutral, range(VOCAB_SIZE)), 3, None)
    assert edits.apply(logits) is logits
    assert edits.rows == []


def test_logits_of_a_model_in_inference_mode_are_changed():
    """As those of transformers' code are."""
    rules = SamplingRules(presence_penalty=0.5, logit_bias=((1, 2.0),))
    edits = BatchLogitsProcessor(range(VOCAB_SIZE))
    processor = LogitsProcessor.of(rules, range(VOCAB_SIZE))
    edits.add(0, processor, 1, TokenHistory([3, 4], num_prompt_tokens=1))
    with torch.inference_mode():
        logits = random_logits() + 0.0
    expected, _ = shaped(random_logits(), [(rules, [3], [4], None)])
    torch.testing.assert_close(edits.apply(logits), expected)


def test_changes_are_applied_in_float32():
    logits = random_logits().bfloat16()
    biased = SamplingRules(logit_bias=((3, 0.001),))
    result, _ = shaped(logits, [(biased, [1], [], None)])
    assert result.dtype == torch.float32
    assert result[0, 3] == logits[0, 3].float() + 0.001


PROMPT, OUTPUT = [5, 6, 7, 5], [8, 9, 8, 6]


@pytest.mark.parametrize(
    ("row_rules", "processor"),
    [
        (SamplingRules(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
        (SamplingRules(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6)),
        (
            SamplingRules(bad_words=((3,), (8, 6, 11), (6, 12), (7, 13))),
            NoBadWordsLogitsProcessor([[3], [8, 6, 11], [6, 12], [7, 13]]),
        ),
        (
            SamplingRules(logit_bias=((2, 5.0), (60, -100.0))),
            SequenceBiasLogitsProcessor([[[2], 5.0], [[60], -100.0]]),
        ),
        (
            SamplingRules(min_tokens=5, end_token_ids=(1, 2)),
            MinNewTokensLengthLogitsProcessor(4, 5, [1, 2]),
        ),
        (
            SamplingRules(min_tokens=4, end_token_ids=(1, 2)),
            MinNewTokensLengthLogitsProcessor(4, 4, [1, 2]),
        ),
    ],
)
def test_equals_transformers(row_rules, processor):
    logits = random_logits()
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    actual, _ = shaped(logits, [(row_rules, PROMPT, OUTPUT, None)])
    torch.testing.assert_close(actual, expected)


def test_penalties_of_the_openai_api():
    penalised = SamplingRules(frequency_penalty=0.5, presence_penalty=0.25)
    logits = random_logits()
    actual, _ = shaped(logits, [(penalised, PROMPT, OUTPUT, None)])
    taken = (logits - actual)[0]
    assert taken[8].item() == pytest.approx(2 * 0.5 + 0.25)
    assert taken[9].item() == taken[6].item() == pytest.approx(0.75)
    assert taken[5] == taken[7] == 0  # in the prompt alone


def test_bad_words_do_not_match_in_the_prompt():
    words = SamplingRules(bad_words=((7, 5, 20), (5, 21), (5, 8, 22), (8, 23)))
    at_once, _ = shaped(random_logits(), [(words, PROMPT, [], None)])
    assert at_once.isfinite().all()
    later, _ = shaped(random_logits(), [(words, PROMPT, [8], None)])
    assert later.isneginf().nonzero()[:, 1].tolist() == [23]


def test_a_completed_grammar_has_priority_over_min_tokens():
    end = 40
    only_end = np.zeros(3, dtype=np.int32)
    only_end[end // 32] = 1 << end % 32
    row_rules = SamplingRules(min_tokens=9, end_token_ids=(end,))
    result, _ = shaped(random_logits(), [(row_rules, [1], [2], only_end)])
    assert result.isfinite().nonzero()[:, 1].tolist() == [end]
    two = only_end.copy()
    two[0] = 1 << 3
    result, _ = shaped(random_logits(), [(row_rules, [1], [2], two)])
    assert result.isfinite().nonzero()[:, 1].tolist() == [3]


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_token_masks(num_rows, num_ranks, stride):
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(num_rows, 96, generator=generator) < 0.5
    words = (allowed.view(num_rows, 3, 32).long() << torch.arange(32)).sum(2)
    logits = random_logits(1 + num_rows * stride)
    places = list(range(1, 1 + num_rows * stride, stride))
    expected = logits.clone()
    expected[places] = expected[places].masked_fill(~allowed[:, :VOCAB_SIZE], -torch.inf)
    parts = []
    for share in partition(VOCAB_SIZE, num_ranks):
        part = logits[:, share.start : share.stop].clone()
        apply_token_masks(part, places, list(words.int().numpy()), share.start)
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), expected)


def test_tokens_beyond_a_mask_are_not_allowed():
    logits = random_logits()
    apply_token_masks(logits, [0], [np.array([-1], dtype=np.int32)], 0)
    assert logits[0, :32].isfinite().all()
    assert logits[0, 32:].isneginf().all()
