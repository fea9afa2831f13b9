"""What the ranks have loaded beside the target: LoRA adapters and versions of a draft head.

The orders that change it belong in `engine.orders`.
"""
