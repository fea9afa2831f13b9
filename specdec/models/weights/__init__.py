"""TODO: weights."""
