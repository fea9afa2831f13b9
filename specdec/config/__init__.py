"""Configuration.

Frozen dataclasses that are validated where they are made, vLLM's spellings of them, and what the
machine offers. No configuration is changed after construction. What a request chooses belongs in
`types`, what a service adds in `cluster.config`.
"""
