"""Which sequences run in a step, with how many tokens and drafts.

The scheduler, its drafts from planning to a step's rows, and the steps in flight on the target.
What happens to the results of a step belongs in `engine.committer`.
"""
