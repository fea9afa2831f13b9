"""Configuration of a service.

Ports, replicas, limits, several models, the configuration file and vLLM's flags. What configures
one engine belongs in `specdec.config`.
"""
