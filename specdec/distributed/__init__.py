"""TODO: distributed."""
