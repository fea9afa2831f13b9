"""What the documentation site has beside the pages under docs/: `make docs`."""
