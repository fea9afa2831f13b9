"""Sampling, verification and draft trees in tensors of fixed shape, without the host.

The same for batches of any shape, through the host, is one folder up.
"""
