"""Recurrent layers between their projections, in torch: convolutions, rules and their kernels.

Pools of states are beside this folder.
"""
