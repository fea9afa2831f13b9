"""Measure how far a model in other precisions is from itself in fp32.

The fp32 model answers the prompts of all suites greedily. Along its answers the next-token
distributions are compared: Kullback-Leibler divergence, total variation, and how often the most
likely token is equal. Speculation changes none of these distributions. The last line printed is
JSON.

    python -m benchmarks.precision [--max-tokens 48] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import DEFAULT_PATH, load_prompts
from benchmarks.recordings import TextScorer, continuations
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS
from benchmarks.workloads import MODEL
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_REFERENCE = "fp32"


@dataclass(frozen=True)
class Distance:
    """Distance of a precision from fp32, over all tokens of the answers.

    kl_divergence: mean, in nats.
    total_variation: mean.
    most_total_variation: maximum over the tokens.
    num_agreeing: number of tokens whose most likely token equals fp32's.
    """

    precision: str
    kl_divergence: float
    total_variation: float
    most_total_variation: float
    num_agreeing: int


@dataclass(frozen=True)
class PrecisionReport:
    """Complete results of a run."""

    command: str
    machine: Machine
    model: str
    num_answers: int
    num_tokens: int
    distances: tuple[Distance, ...]


def distance(name: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Distance:
    """Compare log-probabilities with fp32's, both [tokens, vocab_size], one pair per answer."""
    divergences, variations, agreeing = [], [], 0
    for ours, other in zip(expected, found, strict=True):
        divergences.append((ours.exp() * (ours - other)).sum(1))
        variations.append((ours.exp() - other.exp()).abs().sum(1) / 2)
        agreeing += int((ours.argmax(1) == other.argmax(1)).sum())
    variation = torch.cat(variations)
    return Distance(
        precision=name,
        kl_divergence=float(torch.cat(divergences).mean()),
        total_variation=float(variation.mean()),
        most_total_variation=float(variation.max()),
        num_agreeing=agreeing,
    )


def measure(directory: Path, max_tokens: int) -> tuple[int, int, tuple[Distance, ...]]:
    """Return the number of answers, of their tokens, and the distance of each precision."""
    prompts = load_prompts(DEFAULT_PATH, Tokenizer(directory))
    answers = continuations(directory, prompts, max_tokens)
    expected: list[Tensor] = []
    distances = []
    for name, precision in tqdm(PRECISIONS.items(), "precisions"):
        scorer = TextScorer(directory, precision)
        found = [
            scorer.logits(prompt.token_ids, answer).log_softmax(1)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        if name == _REFERENCE:
            expected = found
        else:
            distances.append(distance(name, expected, found))
    return len(answers), sum(map(len, answers)), tuple(distances)


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark, print one line per precision, and return exit status 0."""
    given = sys.argv[1:] if given is None else given
    options = _parser().parse_args(given)
    directory = resolve(MODEL, progress=print_progress)
    num_answers, num_tokens, distances = measure(directory, options.max_tokens)
    report = PrecisionReport(
        command=command_line("benchmarks.precision", given),
        machine=describe_machine(),
        model=MODEL,
        num_answers=num_answers,
        num_tokens=num_tokens,
        distances=distances,
    )
    for each in report.distances:
        print(
            f"{each.precision:10} divergence {each.kl_divergence:.5f}, total variation "
            f"{each.total_variation:.4f} (at most {each.most_total_variation:.3f}), "
            f"{each.num_agreeing} of {report.num_tokens} most likely tokens equal"
        )
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.precision", description="Measure how far precisions are from fp32."
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="per answer (default: 48)")
    add_output(parser, "precision")
    return parser


if __name__ == "__main__":
    sys.exit(main())
