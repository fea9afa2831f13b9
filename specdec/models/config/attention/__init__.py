"""Sizes of attention that is not one shape of grouped heads: latents, and layers that differ.

What config.json has for them is read by the families.
"""
