"""GGUF files: their header, what this project understands of it, and conversion to a directory.

Everything in a file that decides the output is either converted or refused by its name. Resolution
of model names, and the cache, are in `specdec.models.resolve`.
"""
