"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.other_vocabulary import OtherVocabulary
from specdec.proposers.translation import EqualIds, Translation

__all__ = [
    "DraftModelProposer",
    "DraftRequest",
    "EqualIds",
    "NgramProposer",
    "OtherVocabulary",
    "Proposal",
    "Proposer",
    "Translation",
]
