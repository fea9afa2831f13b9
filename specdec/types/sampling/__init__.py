"""Sampling parameters of a request, under this project's and vLLM's names, and as ranks need them.

Sampling itself belongs in `specdec.sampling`.
"""
