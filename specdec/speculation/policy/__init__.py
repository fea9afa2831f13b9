"""TODO: policy."""
