"""Incremental parsers of a model's answers: reasoning, tool calls and content.

What is sent to clients of it belongs one folder up.
"""
