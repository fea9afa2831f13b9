"""The OpenAI HTTP API.

Chats, completions, responses, models and tokens; the application mounts `routes`. This package
converts bodies to requests of the engine; `replica` runs them.
"""
