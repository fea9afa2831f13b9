"""The OpenAI HTTP API of a Router: chats, completions, responses, models and tokens.

`routes` is what is mounted.
"""
