"""Layers whose state of a sequence is updated by each token, in place of attention."""
