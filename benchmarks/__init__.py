"""Checks that the service is lossless, and measurements of its speed."""
