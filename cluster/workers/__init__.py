"""Ray actors that hold the ranks of a model, and what is around them.

Placement, transport of step messages, supervision and profiling. What a rank computes belongs in
`specdec.worker`.
"""
