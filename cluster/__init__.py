"""The cluster service: Ray actors, Serve deployments, interfaces and the command line.

Everything that runs without Ray, gRPC and HTTP belongs in `specdec`.
"""
