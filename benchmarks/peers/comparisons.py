"""Comparisons of our contenders with each peer, with their aims."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.catalog import PEERS
from benchmarks.rounds import Measured
from benchmarks.summary import Comparison, Ratio, compare, compare_cases
from benchmarks.workloads import NO_METHOD

MANY = 16
LOOKUPS = ("ngram", "suffix")
OURS = {
    "ours fp32": (NO_METHOD, *LOOKUPS),
    "ours bf16": (NO_METHOD, *LOOKUPS),
    "ours int8": (NO_METHOD, *LOOKUPS),
    "ours int8-bf16": (NO_METHOD,),
    "ours w8a8-bf16": (NO_METHOD,),
}
"""Our contenders, named by precision, with the drafting methods measured for each."""
_LEAST_PLAIN = {
    ("ours fp32", "transformers"): 1.6,
    ("ours fp32", "vllm fp32"): 2.0,
    ("ours fp32", "openvino fp32"): 1.1,
    ("ours int8", "llama.cpp q4_1"): 1.0,
    ("ours int8", "openvino int8"): 1.0,
}
_LEAST_MANY = {
    ("ours fp32", "vllm fp32"): 2.0,
    ("ours fp32", "vllm bf16"): 2.0,
    ("ours bf16", "vllm bf16"): 2.0,
    ("ours int8-bf16", "vllm bf16"): 2.0,
    ("ours w8a8-bf16", "vllm bf16"): 2.0,
    ("ours fp32", "openvino fp32"): 1.0,
    ("ours int8", "openvino int8"): 1.0,
}
_LEAST_LOOKUP = {
    ("ours fp32", "transformers"): 1.8,
    ("ours fp32", "openvino fp32 lookup"): 1.0,
    ("ours int8", "openvino int8 lookup"): 1.0,
}
_SUITES_WITH_AIM = ("edit", "humaneval")


def plain_case(contender: str, suite: str) -> str:
    """Return the case name of one stream without speculation."""
    return f"{contender}, {suite}"


def lookup_case(contender: str, suite: str, method: str) -> str:
    """Return the case name of one stream with a lookup.

    Some peers are loaded separately for lookups, with a name suffix that is dropped here.
    """
    return f"{contender.removesuffix(' lookup')} {method}, {suite}"


def many_case(contender: str) -> str:
    """Return the case name of many streams without speculation."""
    return f"{contender}, {MANY} streams"


def comparisons(suites: Sequence[str]) -> list[Comparison]:
    """Compare ours with each peer: one stream over all suites, and many streams."""
    names = [peer.name for peer in PEERS]
    found = [
        Comparison(
            f"{own} / {name}, 1 stream",
            tuple(plain_case(own, suite) for suite in suites),
            tuple(plain_case(name, suite) for suite in suites),
            _LEAST_PLAIN.get((own, name)),
        )
        for own in OURS
        for name in names
    ]
    found += [
        compare_cases(
            f"{own} / {name}, {MANY} streams",
            many_case(own),
            many_case(name),
            _LEAST_MANY.get((own, name)),
        )
        for own in OURS
        for name in names
    ]
    return found


def lookup_ratios(measured: Measured, suites: Sequence[str]) -> list[Ratio]:
    """Return the ratio of our faster lookup to each peer's lookup, by suite."""
    return [
        compare(
            compare_cases(
                f"{own} {method} / {lookup_case(peer.name, suite, LOOKUPS[0])}",
                lookup_case(own, suite, method),
                lookup_case(peer.name, suite, LOOKUPS[0]),
                _LEAST_LOOKUP.get((own, peer.name)) if suite in _SUITES_WITH_AIM else None,
            ),
            measured,
        )
        for own in OURS
        for suite in suites
        for method in _faster_lookup(measured, own, suite)
        for peer in PEERS
        if LOOKUPS[0] in peer.methods and lookup_case(peer.name, suite, LOOKUPS[0]) in measured
    ]


def _faster_lookup(measured: Measured, own: str, suite: str) -> list[str]:
    """Return our lookup with the least time over all rounds; empty if none was measured."""
    seconds = {
        method: sum(each.seconds for each in measured[lookup_case(own, suite, method)])
        for method in LOOKUPS
        if lookup_case(own, suite, method) in measured
    }
    return [min(seconds, key=lambda method: seconds[method])] if seconds else []
