"""Plain data that every other folder may import.

Requests, sampling parameters, the messages of a step, statistics and errors. It imports no other
folder, neither torch nor a network library, and has no behaviour beyond validation of its fields.
"""
