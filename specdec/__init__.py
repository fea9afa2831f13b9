"""Speculative decoding in one process: algorithms, scheduling, running the model."""
