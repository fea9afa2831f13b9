"""What proposers take of the memory of the process that they run in, KV aside."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config.speculative import SpeculativeConfig
from specdec.speculation.proposers.ngram import index_bytes_per_token
from specdec.speculation.proposers.ngram_pool import NGRAM_BYTES
from specdec.speculation.proposers.output_cache import MAX_CACHE_BYTES
from specdec.speculation.proposers.suffix_tree import BYTES_PER_TOKEN as TREE_BYTES_PER_TOKEN

_TRANSLATED_BYTES_PER_TOKEN = 80
"""Of a text in the tokens of a draft model with another vocabulary: two ints in a list."""


@dataclass(frozen=True)
class ProposerMemory:
    """The most there may be, whatever is asked for.

    fixed_bytes: however much runs. bytes_per_sequence: for each sequence that runs.
    bytes_per_token: for each token, prompt and output, of those that run.
    """

    fixed_bytes: int = 0
    bytes_per_sequence: int = 0
    bytes_per_token: int = 0


def proposer_memory(config: SpeculativeConfig | None) -> ProposerMemory:
    """Of all that `config` loads."""
    if config is None:
        return ProposerMemory()
    fixed_bytes, bytes_per_sequence, bytes_per_token = 0, 0, 0
    if "suffix" in config.methods:
        fixed_bytes += MAX_CACHE_BYTES if config.suffix_decoding_max_cached_requests else 0
        bytes_per_token += TREE_BYTES_PER_TOKEN
    if "ngram" in config.methods:
        lengths = config.prompt_lookup_min, config.prompt_lookup_max
        bytes_per_token += index_bytes_per_token(*lengths)
    if "lookahead" in config.methods:
        bytes_per_sequence += config.lookahead_pool_size * NGRAM_BYTES
    if config.model is not None:
        bytes_per_token += _TRANSLATED_BYTES_PER_TOKEN
    return ProposerMemory(fixed_bytes, bytes_per_sequence, bytes_per_token)
