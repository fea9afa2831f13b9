"""Drafting methods: each proposes the next tokens of sequences, which the target verifies.

The interface is `Proposer` (base.py), the registry of methods is methods.py. Policies that decide
how much to draft, and verification, are elsewhere.
"""

from specdec.speculation.proposers.base import DraftRequest, Proposal, Proposer, ProposerMemory
from specdec.speculation.proposers.cross_vocab.draft_vocabulary import DraftVocabulary
from specdec.speculation.proposers.cross_vocab.vocab_adapter import VocabAdapter
from specdec.speculation.proposers.draft_model import DraftModelProposer
from specdec.speculation.proposers.registry import make_proposer, proposer_memory

__all__ = [
    "DraftModelProposer",
    "DraftRequest",
    "DraftVocabulary",
    "Proposal",
    "Proposer",
    "ProposerMemory",
    "VocabAdapter",
    "make_proposer",
    "proposer_memory",
]
