"""Messages between a Router and its ranks, and their serialization.

What is sent with them is `specdec.types.messages`; the sockets belong in `workers.transport`.
"""
