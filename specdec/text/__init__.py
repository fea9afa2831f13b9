"""TODO: text."""
