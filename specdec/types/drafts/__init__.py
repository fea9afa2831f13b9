"""Drafts as plain data: decisions of the policy, lengths, budgets and trees.

The policy itself belongs in `specdec.speculation`.
"""
