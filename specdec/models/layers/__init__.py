"""Tensor-parallel layers; each reads its own shard of a checkpoint.

Arithmetic that needs more than torch belongs in `kernels`.
"""
