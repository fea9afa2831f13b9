"""The OpenAI HTTP API.

Chats, completions, responses, models and tokens; `routes` is what is mounted. Conversion to the
engine's requests happens here, running them in `replica`.
"""
