"""The fixtures of the OpenAI API: a Router on the tiny model, and a client."""

from tests.cluster.api.openai.conftest import http, router, tokenizer

__all__ = ["http", "router", "tokenizer"]
