"""The environment variables whose values are secret."""

from __future__ import annotations

KEYS_VARIABLE = "SPECDEC_API_KEYS"
"""API keys that the service accepts."""
TOKEN_VARIABLE = "SPECDEC_ADMIN_TOKEN"
API_KEY_VARIABLE = "SPECDEC_API_KEY"
"""The API key that a client sends."""

SECRET_VARIABLES = (KEYS_VARIABLE, TOKEN_VARIABLE, API_KEY_VARIABLE)
