"""Measurements of an engine: their definitions, and their recording for requests and steps.

Their export belongs in `cluster.observability` and `llm.metrics`.
"""
