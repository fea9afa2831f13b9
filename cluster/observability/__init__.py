"""Metrics in Prometheus' format, log records and the context of a request that they carry.

Tracing of a request belongs in `replica`, which knows its phases.
"""
