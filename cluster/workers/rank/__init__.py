"""What runs inside the actor of one rank.

The Router's side, which starts and restarts actors, belongs in `workers.groups`.
"""
