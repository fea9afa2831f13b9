"""Drafters as modules that learn.

One file for each method: the module, its initial weights, and its published layout. The entry of
the method in `config.speculation` names the class. Losses, data and the loop belong in `training`;
the networks that serve belong in `models.heads`.
"""
