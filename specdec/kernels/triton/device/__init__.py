"""Triton functions that run on a GPU; the modules of the parent folder launch them.

Importing a module of this folder imports Triton. `TRITON_INTERPRET=1`, set before that, makes the
same functions run in numpy on CPU tensors. Arguments are addresses, integers and floats; upper-case
arguments are compile-time constants. Sizes that are powers of two are written BLOCK_*.
"""
