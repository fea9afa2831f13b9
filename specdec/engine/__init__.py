"""TODO: engine."""
