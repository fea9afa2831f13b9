"""Plain data that every other folder may import.

Requests, sampling parameters, the messages of a step, statistics and errors. Nothing here imports
another folder, torch or a network library, and nothing here has behaviour beyond validation of its
own fields.
"""
