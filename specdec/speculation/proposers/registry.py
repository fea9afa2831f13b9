"""From a configuration to the proposer that it asks for."""

from __future__ import annotations

from specdec.config.speculative import SpeculativeConfig
from specdec.speculation.proposers.base import Proposer
from specdec.speculation.proposers.cascade import CombinedProposer, Lookup
from specdec.speculation.proposers.lookahead import LookaheadProposer
from specdec.speculation.proposers.ngram import NgramProposer
from specdec.speculation.proposers.suffix import SuffixLimits, SuffixProposer
from specdec.types.sampling_params import LookupMethod


def make_proposer(
    config: SpeculativeConfig | None, draft_model: Proposer | None = None
) -> Proposer | None:
    """What drafts as configured, or None if nothing does.

    A draft model needs a worker, so whoever has one makes its proposer.
    """
    if config is None:
        return None
    if config.method == "lookahead":
        return LookaheadProposer(config.lookahead_ngram_size, config.lookahead_pool_size)
    if config.method != "draft_model":
        return _make_lookup(config, config.method).proposer
    assert draft_model is not None, "no proposer was given for draft_model"
    if config.first is None and config.fallback is None:
        return draft_model
    first, fallback = (
        None if method is None else _make_lookup(config, method)
        for method in (config.first, config.fallback)
    )
    return CombinedProposer(draft_model, first, fallback)


def _make_lookup(config: SpeculativeConfig, method: LookupMethod) -> Lookup:
    if method == "ngram":
        ngram = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        return Lookup(method, ngram)
    limits = SuffixLimits(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
    return Lookup(method, SuffixProposer(limits))
