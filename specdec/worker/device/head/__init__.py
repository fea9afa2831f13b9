"""Drafts of a head on the device, after the tokens that a step has verified there.

The head on the host, and what both share, is in `worker.head`.
"""
