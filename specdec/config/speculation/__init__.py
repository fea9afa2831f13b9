"""The drafting methods and their settings, by role.

`speculative_keys`, one folder up, reads them from the user's mapping.
"""
