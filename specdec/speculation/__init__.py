"""TODO: speculation."""
