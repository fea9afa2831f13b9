"""Draft heads: small networks on the target's hidden states, which run on the target's ranks.

Forward passes, checkpoint layouts and their configuration belong here. Which sequences draft, where
features are stored, and how a draft token is sampled belong in `worker`.
"""
