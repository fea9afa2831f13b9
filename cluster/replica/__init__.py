"""One replica.

The Router, its executor, preprocessing of prompts, limits, load, tracing and reports. What is
independent of Ray belongs in `specdec.engine`, protocols in `api`.
"""
