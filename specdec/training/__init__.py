"""Training of drafters, and measurement of what they are worth.

Corpora of the target's own answers, the modules that learn from them, and their evaluation. It
imports the layers below it and is never imported by serving.
"""
