"""Routing hints of gRPC calls, which Serve's proxies pass on as the session id of a call."""

from __future__ import annotations

from itertools import islice
from typing import Any

from cluster.api.base.routing_hint import (
    MAX_PARTS,
    MAX_READ_BYTES,
    RoutingHint,
    claims_hint,
    token_bytes,
)
from protos.specdec.v1 import inference_pb2 as pb

SESSION_METADATA = "session_id"
"""The metadata of a call that Serve takes for its session id."""


def with_hint(metadata: tuple[tuple[str, str], ...], request: Any) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with the hint of its request, if it generates.

    The client's own session id becomes a part of the hint; one that claims to be a hint is removed.
    """
    session = dict(metadata).get(SESSION_METADATA, "")
    others = tuple((key, value) for key, value in metadata if key != SESSION_METADATA)
    if claims_hint(session):
        metadata, session = others, ""
    if (hint := hint_of(request, session)) is None:
        return metadata
    return (*others, (SESSION_METADATA, hint.encode()))


def hint_of(request: Any, session: str) -> RoutingHint | None:
    """Return the hint of a GenerateRequest; None for others and for very long prompts."""
    if not isinstance(request, pb.GenerateRequest) or request.ByteSize() > MAX_READ_BYTES:
        return None
    match request.WhichOneof("prompt"):
        case "text":
            prompt = request.text.encode()
        case "token_ids":
            prompt = token_bytes(request.token_ids.ids) or b""
        case _:
            messages = islice(request.chat.messages, MAX_PARTS)
            texts = (text for each in messages for text in (each.role, each.content))
            prompt = b"".join(text.encode() + b"\0" for text in texts)
    limit = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None
    return RoutingHint.of((request.model, request.cache_salt), prompt, limit, session)
