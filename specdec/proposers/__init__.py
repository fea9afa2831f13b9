"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.ngram import NgramProposer

__all__ = ["DraftRequest", "NgramProposer", "Proposal", "Proposer"]
