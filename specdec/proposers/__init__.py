"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_vocabulary import DraftVocabulary
from specdec.proposers.memory import ProposerMemory, proposer_memory
from specdec.proposers.methods import make_proposer
from specdec.proposers.translation import Translation

__all__ = [
    "DraftModelProposer",
    "DraftRequest",
    "DraftVocabulary",
    "Proposal",
    "Proposer",
    "ProposerMemory",
    "Translation",
    "make_proposer",
    "proposer_memory",
]
