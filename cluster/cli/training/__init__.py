"""Commands that train and measure drafters.

Training itself belongs in `specdec.training`.
"""
