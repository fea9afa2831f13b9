"""`specdec bench`: measures a running service from outside, as its clients see it.

`methods` compares drafting methods one request at a time; `load` sends requests at a rate or at a
fixed concurrency. Benchmarks of the code itself are in benchmarks/.
"""
