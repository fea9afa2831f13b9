"""The step loop of one model.

Admission of requests, scheduling, drafting, verification, commit, outputs and metrics. It has no
clock and no randomness except those that are passed in. Interfaces to callers belong in `llm` and
`cluster`.
"""
