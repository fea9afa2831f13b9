"""The OpenAI HTTP API of a Router: chats, completions, responses, models and tokens."""

from cluster.openai.api_keys import ApiKeys, read_keys
from cluster.openai.routes import openai_routes

__all__ = ["ApiKeys", "openai_routes", "read_keys"]
