"""Definitions of the kernels: inputs, outputs, and the same operations on torch's operators.

The kernels of `kernels.cpu` and `kernels.triton` are compared with these; the choice between them
is one folder up.
"""
