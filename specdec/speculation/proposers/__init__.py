"""Proposers guess the next tokens of a sequence.

One module a method; `config.speculation.methods` registers them. Running a draft model belongs in
`worker`.
"""

from specdec.speculation.proposers.base import (
    AheadProposer,
    AheadWork,
    DraftRequest,
    Proposal,
    ProposalAhead,
    Proposer,
    ProposerMemory,
    SentRow,
    SynchronousProposer,
)
from specdec.speculation.proposers.cascade import load_corpora, make_proposer, proposer_memory
from specdec.speculation.proposers.cross_vocab.draft_vocabulary import DraftVocabulary
from specdec.speculation.proposers.cross_vocab.vocab_adapter import VocabAdapter
from specdec.speculation.proposers.draft_model import DraftModelProposer

__all__ = [
    "AheadProposer",
    "AheadWork",
    "DraftModelProposer",
    "DraftRequest",
    "DraftVocabulary",
    "Proposal",
    "ProposalAhead",
    "Proposer",
    "ProposerMemory",
    "SentRow",
    "SynchronousProposer",
    "VocabAdapter",
    "load_corpora",
    "make_proposer",
    "proposer_memory",
]
