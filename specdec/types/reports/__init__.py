"""Reports of an engine and a service: statistics, profiles, the state of the fleet, receipts.

Metrics with their names belong in `specdec.engine.metrics`.
"""
