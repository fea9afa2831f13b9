"""Generates the pages of the documentation site that are not under docs/ (`make docs`)."""
