"""Registry of the architectures with recurrent layers, a part of `models.config.registry`.

Each file has the entries of families with one kind of recurrence, and the functions that read their
keys. Sizes of the recurrences are in `models.config.recurrent`.
"""
