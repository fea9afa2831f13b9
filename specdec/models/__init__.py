"""Models: configuration, architectures, loading, and resolving a model's name to files.

Finding a model needs no torch; running it does. Layers have a folder of their own, and so have
checkpoint formats.
"""
