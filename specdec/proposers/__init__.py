"""Proposers guess the next tokens of a sequence; the target verifies them."""

from specdec.proposers.base import DraftRequest, Proposal, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.methods import make_proposer

__all__ = ["DraftModelProposer", "DraftRequest", "Proposal", "Proposer", "make_proposer"]
