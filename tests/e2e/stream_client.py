"""Streams from a service, for tests in other network namespaces, and prints the results as JSON.

Arguments: number of concurrent streams, number of tokens of each, timeout in seconds, and `plain`
for streams without drafts.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

ADDRESS = "127.0.0.1:9000"


def ask(index: int, num_tokens: int, timeout_s: float, *, is_plain: bool) -> dict[str, object]:
    """Run one stream; return its tokens, number of draft tokens, error, duration and pauses."""
    params = SamplingParams(
        temperature=0.8 * (index % 2),
        seed=index,
        max_tokens=num_tokens,
        ignore_eos=True,
        speculation=SpeculationOptions(enabled=not is_plain),
    )
    started_at, token_ids, num_drafted, error = time.monotonic(), [], 0, ""
    arrivals_s = []
    try:
        with Client(ADDRESS, timeout_s=timeout_s) as client:
            for chunk in client.generate_stream(f"The river {index}", params):
                token_ids.extend(chunk.token_ids)
                arrivals_s.append(time.monotonic())
                if chunk.usage is not None and chunk.usage.speculation is not None:
                    num_drafted = chunk.usage.speculation.num_draft_tokens
    except ClientError as client_error:
        error = client_error.code.name
    took_s = time.monotonic() - started_at
    longest_pause_s = max((after - before for before, after in pairwise(arrivals_s)), default=0.0)
    return {
        "token_ids": token_ids,
        "num_drafted": num_drafted,
        "error": error,
        "took_s": took_s,
        "longest_pause_s": longest_pause_s,
    }


if __name__ == "__main__":
    num_streams, num_tokens, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    is_plain = sys.argv[4:] == ["plain"]
    with ThreadPoolExecutor(num_streams) as pool:
        ask_one = partial(ask, num_tokens=num_tokens, timeout_s=timeout_s, is_plain=is_plain)
        answers = pool.map(ask_one, range(num_streams))
        print(json.dumps(list(answers)))
