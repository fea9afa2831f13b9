"""Resumption of interrupted streams.

With verifier `coupled` the output of a request is a function of its prompt, parameters and seed.
Another replica, or the same one after a restart, therefore continues after the received tokens with
the tokens that would have followed (in float32; differently shaped batches in bfloat16 may break a
tie differently). With `rejection` and `block` it continues with others of the same distribution.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from grpc import StatusCode

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.attempts import RETRY_DELAYS_S, Attempts
from specdec.types.responses import StreamChunk

RESUME_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 15.0)
"""Mean pause before each further attempt: a minute in all, as a replica or a proxy of Ray Serve
may take to start on a busy machine."""

_TRANSIENT = frozenset({StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED})
"""A replica is lost, or the remaining ones are full for the moment."""


class Resumption(Attempts):
    """Attempts of a streamed request, and the remainder of its output.

    Without a first chunk there is nothing to resume: the attempts are those of other calls. A
    request that cannot be resumed, as one with several choices, fails once it has a chunk.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        now_s: Callable[[], float] = time.monotonic,
        *,
        is_resumable: bool = True,
    ) -> None:
        """request: changed with each chunk. timeout_s: from now on; None: no limit."""
        super().__init__(timeout_s, RETRY_DELAYS_S, now_s)
        self.request = request
        self._num_open = request.sampling.n or 1  # choices that have not ended
        self._is_resumable = is_resumable

    @property
    def is_complete(self) -> bool:
        """Return whether all choices have ended."""
        return self._num_open == 0

    def record(self, chunk: StreamChunk) -> None:
        """Change the request to one for what follows a chunk; the attempts begin again."""
        self._last_error = None
        self._num_open -= chunk.finish_reason is not None
        if not self._is_resumable:
            self._delays_s = iter(())
            return
        request, self._codes = self.request, _TRANSIENT
        self._delays_s, self._log_level = iter(RESUME_DELAYS_S), logging.WARNING
        request.request_id = chunk.request_id
        request.resume_token_ids.extend(chunk.token_ids)
        request.sampling.ClearField("prompt_logprobs")  # they came with the first chunk
        if chunk.seed is not None:
            request.sampling.seed = chunk.seed
