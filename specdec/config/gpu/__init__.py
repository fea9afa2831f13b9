"""Sizes and choices that only a GPU needs: graphs, splits of attention, shared devices.

Sizes that depend on the memory of a machine belong in `specdec.engine.memory`.
"""
