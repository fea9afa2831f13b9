"""Sockets between a Router and its ranks.

Serialization belongs in `workers.messages`.
"""
