"""Set up other engines, and measure them and this project on the same prompts.

Run as `python -m benchmarks.peers [--only vllm openvino] [--directory DIR] [--output FILE]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.contenders import EngineContender, EngineSettings
from benchmarks.machine import describe_machine
from benchmarks.peers.catalog import PEERS, SETTINGS, Peer, Setup
from benchmarks.peers.comparisons import (
    MANY,
    OURS,
    comparisons,
    lookup_case,
    lookup_ratios,
    many_case,
    plain_case,
)
from benchmarks.peers.environments import PeerUnavailableError
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.report import PeersReport, PeerStatus, agreements, chart, markdown
from benchmarks.precisions import PRECISIONS
from benchmarks.prompts import (
    SUITES,
    BenchmarkPrompt,
    add_prompts_option,
    by_suite,
    load_prompts,
    of_similar_length,
)
from benchmarks.report_file import add_output, parse_options, write_report, write_text
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.summary import compare_all, print_ratios, print_rows, summarize
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, NO_METHOD, Contender, Workload, all_at_once, one_by_one
from specdec.config.hardware import default_cache_dir
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_PROBE = (1, 2, 3, 4)
"""Prompt that checks whether a loaded peer can run."""
_NUM_BLOCKS = 512  # of 16 tokens, for each of our methods


def make_cases(
    contender: str,
    methods: Sequence[str],
    max_streams: int,
    prompts: Sequence[BenchmarkPrompt],
    options: argparse.Namespace,
) -> list[Case]:
    """Return the cases of one contender in a round: one prompt per suite, and many streams."""
    cases = []
    for suite, own in by_suite(prompts, options.suites, options.rounds).items():
        for method in methods:
            is_plain = method == NO_METHOD
            name = (
                plain_case(contender, suite) if is_plain else lookup_case(contender, suite, method)
            )
            cases.append(Case(name, contender, one_by_one(own, options.max_tokens, method)))
    if max_streams >= MANY and NO_METHOD in methods:
        workloads = all_at_once(of_similar_length(prompts, MANY), MANY, options.max_tokens)
        cases.append(Case(many_case(contender), contender, workloads))
    return cases


def enter_peers(
    stack: ExitStack, peers: Sequence[Peer], setup: Setup
) -> tuple[dict[str, Contender], list[PeerStatus]]:
    """Set up and load the peers one after the other, and run a short prompt on each.

    Failures are reported in the statuses.
    """
    contenders: dict[str, Contender] = {}
    statuses = []
    for peer in tqdm(peers, "loading peers", leave=False):
        log = setup.root / f"{peer.name.replace(' ', '-')}.log"
        try:
            process = stack.enter_context(PeerProcess(peer.launch(setup), log))
            process.measure(Workload((_PROBE,), len(_PROBE), peer.methods[0]))
        except (PeerUnavailableError, OSError) as error:
            print_progress(f"{peer.name} is missing: {error}")
            statuses.append(PeerStatus(peer.name, peer.precision, {}, 0.0, str(error)))
            continue
        contenders[peer.name] = process
        loaded = process.loaded
        statuses.append(PeerStatus(peer.name, peer.precision, loaded.versions, loaded.load_s))
    return contenders, statuses


def enter_ours(stack: ExitStack, directory: Path) -> dict[str, Contender]:
    """Load our engine in process, with one process per precision."""
    contenders: dict[str, Contender] = {}
    for name, methods in OURS.items():
        precision = PRECISIONS[name.removeprefix("ours ")]
        settings = EngineSettings(
            precision.dtype,
            precision.quantization,
            methods=methods,
            num_blocks=_NUM_BLOCKS,
        )
        factory = partial(EngineContender, settings=settings)
        contenders[name] = stack.enter_context(Worker(factory, directory))
    return contenders


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a peer is missing, whatever the figures."""
    options = parse_options(_parser(), arguments)
    report = measure(options)
    print_rows(report.rows)
    print_ratios(report.ratios)
    missing = [each for each in report.peers if each.missing]
    for each in missing:
        print(f"MISSING {each.name}: {each.missing}")
    write_text(options.output.with_suffix(".md"), markdown(report, options.suites, SETTINGS))
    write_report(report, options.output)
    write_text(options.output.with_suffix(".svg"), chart(report, options.suites))
    return 1 if missing else 0


def measure(options: argparse.Namespace) -> PeersReport:
    """Load all contenders, and measure in rounds."""
    directory = resolve(MODEL)
    prompts = load_prompts(options.prompts, Tokenizer(directory))
    peers = [peer for peer in PEERS if _is_selected(peer.name, options.only)]
    options.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        loaded, statuses = enter_peers(stack, peers, Setup(options.directory, directory, MODEL))
        ours = enter_ours(stack, directory)
        cases = [
            case
            for peer in peers
            if peer.name in loaded
            for case in make_cases(peer.name, peer.methods, peer.max_streams, prompts, options)
        ]
        for name in ours:
            cases += make_cases(name, OURS[name], MANY, prompts, options)
        measured = _in_rounds({**loaded, **ours}, cases, options)
    return PeersReport(
        command=options.command,
        machine=describe_machine(),
        model=MODEL,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        peers=tuple(statuses),
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        ratios=(
            *compare_all(comparisons(options.suites), measured),
            *lookup_ratios(measured, options.suites),
        ),
        agreements=agreements(measured, options.suites),
    )


def _in_rounds(
    contenders: Mapping[str, Contender], cases: Sequence[Case], options: argparse.Namespace
) -> Measured:
    warm_up(contenders, cases)
    return measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)


def _is_selected(name: str, only: Sequence[str]) -> bool:
    return not only or any(name.startswith(prefix) for prefix in only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers", description="Set up other engines, and compare them with ours."
    )
    parser.add_argument(
        "--only", nargs="+", default=(), help="prefixes of peer names (default: all peers)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=default_cache_dir() / "peers",
        help="directory of environments, models and logs",
    )
    parser.add_argument("--suites", nargs="+", default=SUITES)
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=5)
    add_output(parser, "peers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
