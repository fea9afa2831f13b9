"""Requests of an engine: from validated input to streamed outputs and their end.

Nothing here knows the models; measurements of requests belong in `engine.metrics`.
"""
