"""How much to draft in a step.

Acceptance estimates, a cost model of steps, goodput, and thresholds with hysteresis. A policy is a
pure function of load, acceptance and an injected clock. What an operator sets is plain data in
`types.control`.
"""
