"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.ngram import NgramProposer

__all__ = ["DraftModelProposer", "DraftRequest", "NgramProposer", "Proposal", "Proposer"]
