"""Resumption of interrupted streams.

With verifier `coupled` the output of a request is a function of its prompt, parameters and seed.
Another replica, or the same one after a restart, therefore continues after the received tokens with
the tokens that would have followed (in float32; differently shaped batches in bfloat16 may break a
tie differently). With `rejection` and `block` it continues with others of the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable

from grpc import StatusCode

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.connection import ClientError
from specdec.types.responses import StreamChunk

RESUME_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 15.0)
"""Seconds before each further attempt: a minute in all, as a replica or a proxy of Ray Serve may
take to start on a busy machine."""

_TRANSIENT = (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
"""A replica is lost, or the remaining ones are full for the moment."""


class Resumption:
    """Remainder of a streamed request, and the time that all its attempts share.

    A request with several choices cannot be resumed.
    """

    def __init__(
        self, request: pb.GenerateRequest, timeout_s: float | None, now_s: Callable[[], float]
    ) -> None:
        """request: changed with each chunk. timeout_s: from now on; None: no limit."""
        self.request = request
        self.is_complete = False
        self._has_begun = False
        self._delays_s = iter(RESUME_DELAYS_S)  # since the last chunk
        self._now_s = now_s
        self._ends_at_s = None if timeout_s is None else now_s() + timeout_s

    @property
    def timeout_s(self) -> float | None:
        """Seconds that the next attempt may take; None: no limit."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._now_s())

    def record(self, chunk: StreamChunk) -> None:
        """Change the request to one for what follows a chunk; the attempts begin again."""
        request, self._has_begun = self.request, True
        self._delays_s = iter(RESUME_DELAYS_S)
        request.request_id = chunk.request_id
        request.resume_token_ids.extend(chunk.token_ids)
        request.sampling.ClearField("prompt_logprobs")  # they came with the first chunk
        if chunk.seed is not None:
            request.sampling.seed = chunk.seed
        self.is_complete = chunk.finish_reason is not None

    def delay_s(self, error: ClientError) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` if there is none.

        Without a first chunk there is nothing to resume, and the client's own retries are over.
        """
        delay_s = next(self._delays_s, None)
        if not self._has_begun or error.code not in _TRANSIENT or delay_s is None:
            raise error
        left_s = self.timeout_s
        return delay_s if left_s is None else min(delay_s, left_s)
