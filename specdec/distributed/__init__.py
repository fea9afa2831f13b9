"""Tensor parallelism between the ranks of one model.

Process groups, collectives and rendezvous. How a layer is split belongs with the layer in
`models.layers`; starting the processes belongs in `cluster.workers`.
"""
