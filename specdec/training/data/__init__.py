"""The data of a training run: prompts, the corpus of answers, batches, and the teacher.

What is learned from it belongs in `training.drafters` and `training.trainer`.
"""
