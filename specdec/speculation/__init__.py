"""What to draft and how much: proposers make drafts, the policy chooses their length.

Verification of a draft belongs in `sampling.verifiers`, the step loop that calls both in `engine`.
"""
