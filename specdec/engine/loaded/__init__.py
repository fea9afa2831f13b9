"""LoRA adapters and versions of a draft head that ranks have loaded beside the target.

The orders that change it belong in `engine.orders`.
"""
