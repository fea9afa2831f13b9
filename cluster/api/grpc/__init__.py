"""The gRPC interface.

Servicers, their limits and status codes, forwarding to other applications, and the servers they are
mounted on. The codec is shared with the client: `specdec.client.codec`.
"""
