"""`specdec bench`: measures a running service as a client.

`methods` compares drafting methods one request at a time; `serve` sends requests at a given rate or
concurrency. Benchmarks of the code itself are in benchmarks/.
"""
