"""Count the prompt tokens that two replicas compute for conversations, by routing policy.

Runs the real service with Ray Serve's proxies once for each policy. Conversations of several turns
are open at once, and their turns come in the same random order for each policy; a few requests run
at a time. Every turn sends the whole conversation so far, as chat clients do. Computed prompt
tokens are those of the replicas' prompts less those found in their prefix caches; the load of a
replica is what it computed, generated tokens included. The last line printed is JSON.

    python -m benchmarks.routing [--conversations 40] [--turns 6] [--policies prefix random]
        [--model NAME] [--output FILE]

Exits with 1 if prefix computes more than two thirds of what random choice does, or a replica has
more than 1.2 times the mean load.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Lock
from typing import Any, NamedTuple, Self

import httpx

from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.service import ServiceProcess, started_service
from benchmarks.summary import Bar, at_least, at_most, print_bars
from benchmarks.workloads import MODEL
from cluster.config.serve_config import RoutingPolicy

_NUM_REPLICAS = 2
_NUM_OPEN = 8
_ANSWER_TOKENS = 32
_SYSTEM = "You are a patient teacher. Answer in plain words, and give one example for each answer."
# fmt: off
_WORDS = (
    "river", "mountain", "engine", "window", "garden", "letter", "music", "winter", "bridge",
    "market", "doctor", "island", "paper", "castle", "thunder", "orange", "village", "ladder",
    "mirror", "harbor", "candle", "forest", "copper", "pillow", "rocket",
)
# fmt: on
_WORDS_OF_TURN = (20, 60)
_REPORT_S = 3.0  # replicas report within a second of their last change
_TIMEOUT_S = 600.0


class ReplicaCounts(NamedTuple):
    """Counters of a replica."""

    requests: int
    prompt_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Self:
        """Return them from the `counts` of a report."""
        prompt, cached = counts["num_prompt_tokens"], counts["num_cached_tokens"]
        return cls(counts["num_requests"], prompt, prompt - cached, counts["num_generated_tokens"])


def _difference(after: ReplicaCounts, before: ReplicaCounts) -> ReplicaCounts:
    return ReplicaCounts(*(late - early for late, early in zip(after, before, strict=True)))


@dataclass(frozen=True)
class PolicyResult:
    """Counts of one policy over the whole run.

    prompt_tokens: of all requests. computed_prompt_tokens: those not found in a prefix cache.
    replica_tokens, replica_requests: prompt tokens computed and tokens generated, and requests, of
    each replica. load_ratio: the largest of either over its mean.
    """

    policy: str
    seconds: float
    prompt_tokens: int
    computed_prompt_tokens: int
    replica_tokens: tuple[int, ...]
    replica_requests: tuple[int, ...]
    load_ratio: float


@dataclass(frozen=True)
class RoutingReport:
    """Complete results."""

    command: str
    machine: Machine
    model: str
    num_conversations: int
    num_turns: int
    results: tuple[PolicyResult, ...]
    bars: tuple[Bar, ...]


class Conversations:
    """Chats whose turns come in a random order, the same one for each instance."""

    def __init__(self, count: int, num_turns: int, seed: int = 0) -> None:
        self._source = random.Random(seed)
        self._messages = [[{"role": "system", "content": _SYSTEM}] for _ in range(count)]
        order = [index for index in range(count) for _ in range(num_turns)]
        self._source.shuffle(order)
        self._questions = [(index, self._question(index)) for index in order]
        self._locks = [Lock() for _ in range(count)]

    def _question(self, index: int) -> str:
        words = self._source.choices(_WORDS, k=self._source.randint(*_WORDS_OF_TURN))
        return f"Question of reader {index}: {' '.join(words)}?"

    def run(self, http_url: str) -> None:
        """Send all turns, a few at a time; raise the first error of a request."""
        waiting: Queue[tuple[int, str]] = Queue()
        for each in self._questions:
            waiting.put(each)

        def send_all() -> None:
            with httpx.Client(base_url=http_url, timeout=_TIMEOUT_S) as http:
                while True:
                    try:
                        index, question = waiting.get_nowait()
                    except Empty:
                        return
                    self._send(http, index, question)

        with ThreadPoolExecutor(_NUM_OPEN) as pool:
            for done in [pool.submit(send_all) for _ in range(_NUM_OPEN)]:
                done.result()

    def _send(self, http: httpx.Client, index: int, question: str) -> None:
        """Send one turn; those of a conversation follow each other."""
        with self._locks[index]:
            messages = self._messages[index]
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            text = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})


def measure(
    policy: RoutingPolicy, model: str, num_conversations: int, num_turns: int
) -> PolicyResult:
    """Run the conversations on a new service."""
    settings = {"ingress": "serve", "num_replicas": _NUM_REPLICAS, "routing_policy": policy}
    with started_service(model, **settings) as service:
        before = _counts(service)
        started_at = time.monotonic()
        Conversations(num_conversations, num_turns).run(service.http_url)
        seconds = time.monotonic() - started_at
        time.sleep(_REPORT_S)
        after = _counts(service)
    return result_of(policy, seconds, [_difference(after[name], before[name]) for name in after])


def _counts(service: ServiceProcess) -> Mapping[str, ReplicaCounts]:
    """Return the counters of each replica, by its id."""
    answer = httpx.get(f"{service.http_url}/v1/admin/replicas").raise_for_status().json()
    reports = [each["report"] for each in answer["replicas"]]
    return {each["replica_id"]: ReplicaCounts.of(each["counts"]) for each in reports}


def result_of(policy: str, seconds: float, counts: Sequence[ReplicaCounts]) -> PolicyResult:
    """Return the result of a policy from the counts of each replica."""
    tokens = [each.computed_prompt_tokens + each.generated_tokens for each in counts]
    requests = [each.requests for each in counts]
    return PolicyResult(
        policy,
        seconds,
        sum(each.prompt_tokens for each in counts),
        sum(each.computed_prompt_tokens for each in counts),
        tuple(tokens),
        tuple(requests),
        max(max(each) * len(each) / sum(each) for each in (tokens, requests)),
    )


def bars_of(results: Sequence[PolicyResult]) -> tuple[Bar, ...]:
    """Return the limits, where both policies were measured."""
    by_policy = {each.policy: each for each in results}
    if not {"prefix", "random"} <= by_policy.keys():
        return ()
    ours, baseline = by_policy["prefix"], by_policy["random"]
    ratio = baseline.computed_prompt_tokens / ours.computed_prompt_tokens
    return (
        at_least("prompt tokens computed with random choice / with prefix", ratio, 1.5),
        at_most("largest load of a replica / mean", ours.load_ratio, 1.2),
    )


def main() -> int:
    """Measure and report; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    choices = ("prefix", "power_of_two", "random")
    parser.add_argument("--policies", nargs="+", choices=choices, default=["prefix", "random"])
    add_output(parser)
    options = parser.parse_args()
    results = []
    for policy, count in Counter(options.policies).items():
        for _ in range(count):
            found = measure(policy, options.model, options.conversations, options.turns)
            results.append(found)
            print(
                f"{policy}: {found.computed_prompt_tokens} of {found.prompt_tokens} prompt tokens "
                f"computed in {found.seconds:.0f} s, load ratio {found.load_ratio:.2f}",
                flush=True,
            )
    bars = bars_of(results)
    print_bars(bars)
    report = RoutingReport(
        command_line("benchmarks.routing", sys.argv[1:]),
        describe_machine(),
        options.model,
        options.conversations,
        options.turns,
        tuple(results),
        bars,
    )
    write_report(report, options.output)
    return 0 if all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
