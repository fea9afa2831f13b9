"""Reports of an engine and a service: statistics, profiles and the state of the fleet.

Metrics with their names belong in `specdec.engine.metrics`.
"""
