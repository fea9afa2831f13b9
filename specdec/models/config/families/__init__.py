"""Entries of the registry that need more than a few lines, a file for each maker or kind.

A file has the architectures and what reads their keys. What the layers of several families share is
in `family_traits`; the layers are in `models.layers`.
"""
