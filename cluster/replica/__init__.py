"""TODO: replica."""
