"""Drafting with a model whose vocabulary differs from the target's.

Mapping tokens where both vocabularies agree, and retokenizing text where they do not. Remapping of
logits on a rank belongs in `worker`.
"""
