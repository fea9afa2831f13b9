"""Sampling of tokens from logits.

Logits processors, truncation, Gumbel noise and argmax over a vocabulary that is split across ranks.
Acceptance of draft tokens belongs in `verifiers`, resolving a request's parameters in `engine`.
"""
