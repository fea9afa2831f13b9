"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_vocabulary import DraftVocabulary
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.translation import Translation

__all__ = [
    "DraftModelProposer",
    "DraftRequest",
    "DraftVocabulary",
    "NgramProposer",
    "Proposal",
    "Proposer",
    "Translation",
]
