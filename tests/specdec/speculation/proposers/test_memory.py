"""Tests that the planned memory of proposers covers their use without much excess."""

import random
import tracemalloc

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.proposers import ProposerMemory, proposer_memory
from specdec.speculation.proposers.base import IngestBudget
from specdec.speculation.proposers.lookahead import NGRAM_BYTES
from specdec.speculation.proposers.ngram import NgramIndex, OccurrenceIndex
from specdec.speculation.proposers.suffix import MAX_CACHE_BYTES
from specdec.speculation.proposers.suffix_tree import OnlineSuffixTree


def indexed(text, config):
    index = NgramIndex(config.drafter.prompt_lookup_min, config.drafter.prompt_lookup_max)
    index.update(text, IngestBudget(len(text)))
    occurrences = OccurrenceIndex(config.drafter.prompt_lookup_min - 1)
    occurrences.update(text, IngestBudget(len(text)))
    return index, occurrences


def treed(text, config):
    grown = OnlineSuffixTree(config.drafter.suffix_decoding_max_tree_depth)
    for token in text:
        grown.append(token)
    return grown


@pytest.mark.parametrize("num_kinds", [20, 40_000])
@pytest.mark.parametrize("num_tokens", [3000, 5500])
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (indexed, SpeculativeConfig.of("ngram")),
        (indexed, SpeculativeConfig.of("ngram", prompt_lookup_min=1, prompt_lookup_max=1)),
        (indexed, SpeculativeConfig.of("ngram", prompt_lookup_min=1, prompt_lookup_max=16)),
        (treed, SpeculativeConfig.of("suffix")),
    ],
)
def test_no_text_takes_more_memory_than_planned(make, config, num_tokens, num_kinds):
    generator = random.Random(0)
    text = [300 + generator.randrange(num_kinds) for _ in range(num_tokens)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = make(text, config)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del kept
    planned = num_tokens * proposer_memory(config).bytes_per_token
    assert after - before <= planned
    assert num_kinds < 1000 or after - before > 0.4 * planned, "far too much memory is planned"


def test_the_memory_of_loaded_proposers_adds_up():
    first = SpeculativeConfig.of("draft_model", first="ngram")
    both = SpeculativeConfig.of("draft_model", first="ngram", fallback="suffix")
    ngram, suffix = (proposer_memory(SpeculativeConfig.of(name)) for name in ("ngram", "suffix"))
    assert proposer_memory(first) == ngram
    assert proposer_memory(both) == ProposerMemory(
        MAX_CACHE_BYTES, 0, ngram.bytes_per_token + suffix.bytes_per_token
    )
    other = SpeculativeConfig.of("draft_model", model="./other")
    assert proposer_memory(other).bytes_per_token > 0
    lookahead = SpeculativeConfig.of("lookahead", lookahead_pool_size=7)
    assert proposer_memory(lookahead) == ProposerMemory(bytes_per_sequence=7 * NGRAM_BYTES)
    assert proposer_memory(None) == ProposerMemory()
