"""The OpenAI HTTP API of a Router: chats, completions, responses, models and tokens.

`routes` is what is mounted, and `api_keys` who may come in. Nothing is imported here: keys are
read before Ray may be.
"""
