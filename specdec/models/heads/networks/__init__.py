"""Forward passes of draft heads, tensor-parallel like the target's.

Each module implements `DraftHead` for the shapes of one module in `formats`.
"""
