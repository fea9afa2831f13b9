"""TODO: serve."""
