"""TODO: types."""
