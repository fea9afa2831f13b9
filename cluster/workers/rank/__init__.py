"""The process of one rank: its actor, its worker, and the messages that it answers.

The Router's side, which starts and restarts actors, belongs in `workers.groups`.
"""
