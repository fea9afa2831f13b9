"""Measures how far a model in other precisions is from itself in fp32.

fp32 answers the prompts of all suites, greedily. Along its answers the distributions of the next
token are compared: Kullback-Leibler divergence from fp32's, total variation, and how often the
likeliest token is fp32's. Speculation changes none of these distributions, in any precision. The
last line printed is JSON.

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
from benchmarks.recordings import Judge, continuations
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_MODEL = "smollm2-135m-instruct"
_REFERENCE = "fp32"


@dataclass(frozen=True)
class Distance:
    """Of a precision from fp32, over all tokens of the answers.

    kl_divergence: mean, in nats. total_variation: mean. most_total_variation: of one token.
    num_agreeing: tokens of which the likeliest is fp32's.
    """

    precision: str
    kl_divergence: float
    total_variation: float
    most_total_variation: float
    num_agreeing: int


@dataclass(frozen=True)
class PrecisionReport:
    """Everything that was measured."""

    command: str
    machine: Machine
    model: str
    num_answers: int
    num_tokens: int
    distances: tuple[Distance, ...]


def distance(name: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Distance:
    """Of log-probabilities from those of fp32, both [tokens, vocab_size], one pair an answer."""
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
    """How many answers, how many tokens of them, and each precision along them."""
    prompts = load_prompts(DEFAULT_PATH, Tokenizer(directory))
    answers = continuations(directory, prompts, max_tokens)
    expected: list[Tensor] = []
    distances = []
    for name, precision in tqdm(PRECISIONS.items(), "precisions"):
        judge = Judge(directory, precision)
        found = [
            judge.logits(prompt.token_ids, answer).log_softmax(1)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        if name == _REFERENCE:
            expected = found
        else:
            distances.append(distance(name, expected, found))
    return len(answers), sum(map(len, answers)), tuple(distances)


def main(given: Sequence[str] | None = None) -> int:
    """Prints a line for each precision, and writes the JSON."""
    given = sys.argv[1:] if given is None else given
    options = _parser().parse_args(given)
    directory = resolve(_MODEL, progress=print_progress)
    num_answers, num_tokens, distances = measure(directory, options.max_tokens)
    report = PrecisionReport(
        command=command_line("benchmarks.precision", given),
        machine=describe_machine(),
        model=_MODEL,
        num_answers=num_answers,
        num_tokens=num_tokens,
        distances=distances,
    )
    for each in report.distances:
        print(
            f"{each.precision:10} divergence {each.kl_divergence:.5f}, total variation "
            f"{each.total_variation:.4f} (at most {each.most_total_variation:.3f}), "
            f"{each.num_agreeing} of {report.num_tokens} likeliest tokens"
        )
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.precision", description="Measure how far precisions are from fp32."
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer; 48")
    add_output(parser, "precision")
    return parser


if __name__ == "__main__":
    sys.exit(main())
