"""Definitions of the operations on rows (`row_ops`), in tensors of fixed shape.

Sampling, the best children of nodes, verification, growth of trees and changes of logits. What the
ranks of a group exchange, and what the host knows about rows, is one folder up.
"""
