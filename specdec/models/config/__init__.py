"""The shape of a model, from its `config.json`, and the registry of architectures.

Nothing here reads weights or imports torch.
"""
