"""Orders to a running engine to load and unload adapters and versions of a draft head.

What is loaded belongs in `engine.loaded`.
"""
