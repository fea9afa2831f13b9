"""The network interfaces (gRPC, HTTP, OpenAI API, dashboard) and what they share.

Shared: error codes, API keys, the admin token, server-sent events. Requests run in `replica`.
"""
