"""The limits and errors of this service in the processes of Ray Serve's proxies.

The servers in the Router's process are made by `api.ingress`.
"""
