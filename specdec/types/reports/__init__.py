"""What an engine and a service report: statistics, profiles and the state of the fleet.

Metrics with their names belong in `specdec.engine.metrics`.
"""
