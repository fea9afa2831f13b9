"""Installation: pip with progress for `make serve`, and the distributions of `make wheel`."""
