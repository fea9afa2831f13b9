"""TODO: cross_vocab."""
