"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_vocabulary import DraftVocabulary
from specdec.proposers.methods import make_proposer
from specdec.proposers.ngram_pool import NGRAM_BYTES
from specdec.proposers.output_cache import MAX_CACHE_BYTES
from specdec.proposers.translation import Translation

__all__ = [
    "MAX_CACHE_BYTES",
    "NGRAM_BYTES",
    "DraftModelProposer",
    "DraftRequest",
    "DraftVocabulary",
    "Proposal",
    "Proposer",
    "Translation",
    "make_proposer",
]
