"""The HTTP interface besides OpenAI's.

The application, health, metrics, administration, and forwarding to other applications. Schemas of
OpenAI's API belong in `api.openai`.
"""
