"""Plain data that processes exchange: requests, answers, statistics and errors.

Nothing here imports from other folders of this package, and nothing here computes.
"""
