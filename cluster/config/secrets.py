"""The environment variables whose values are secret."""

from __future__ import annotations

KEYS_VARIABLE = "SPECDEC_API_KEYS"
"""API keys that the service accepts."""
TOKEN_VARIABLE = "SPECDEC_ADMIN_TOKEN"
API_KEY_VARIABLE = "SPECDEC_API_KEY"
"""The API key that a client sends."""

REDIS_PASSWORD_VARIABLE = "REDIS_PASSWORD"
"""The password of the Redis with the tables of Ray's GCS, which KubeRay gives to a head pod."""

SECRET_VARIABLES = (KEYS_VARIABLE, TOKEN_VARIABLE, API_KEY_VARIABLE, REDIS_PASSWORD_VARIABLE)
