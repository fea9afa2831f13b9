"""Models that the modelling code of transformers runs, over paged KV.

Shapes of these models belong in `models.config.transformers_config`.
"""
