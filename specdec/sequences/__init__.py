"""TODO: sequences."""
