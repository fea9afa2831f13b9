"""Everything that a caller reaches over the network, and what the interfaces share.

Errors, API keys, the admin token, server-sent events. Requests run in `replica`.
"""
