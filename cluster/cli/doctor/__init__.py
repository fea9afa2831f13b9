"""`specdec doctor`: facts about the machine, and their evaluation.

Checks of a configuration that `specdec serve` makes belong in `cluster.config`.
"""
