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
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS, Precision
from specdec import LLM
from specdec.dtypes import DTYPES
from specdec.model_config import ModelConfig
from specdec.model_input import Chunk, ModelInput
from specdec.models.loading import Decoder, load_model
from specdec.models.store import print_progress, resolve
from specdec.parallel import TensorParallelGroup
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import Tokenizer

_MODEL = "smollm2-135m-instruct"
_REFERENCE = "fp32"
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2048

Answer = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of what fp32 said to it."""


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


class _Judge:
    """The model in one precision."""

    def __init__(self, directory: Path, precision: Precision) -> None:
        self._model: Decoder = load_model(
            directory,
            ModelConfig.from_directory(directory),
            TensorParallelGroup(),
            dtype=DTYPES[precision.dtype],
            max_model_len=_MAX_MODEL_LEN,
            block_size=_BLOCK_SIZE,
            quantization=precision.quantization,
        )
        self._kv_cache = self._model.new_kv_cache(_MAX_MODEL_LEN)

    def log_probs(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """[len(answer), vocab_size], before each token of the answer."""
        table = list(range(_MAX_MODEL_LEN // _BLOCK_SIZE))
        batch = ModelInput([Chunk([*prompt, *answer[:-1]], 0, table)], _BLOCK_SIZE)
        hidden = self._model(batch, self._kv_cache)[len(prompt) - 1 :]
        return self._model.compute_logits(hidden).float().log_softmax(1)


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


@torch.inference_mode()
def measure(directory: Path, answers: Sequence[Answer]) -> tuple[Distance, ...]:
    """Of each precision, along what fp32 said."""
    expected: list[Tensor] = []
    distances = []
    for name, precision in tqdm(PRECISIONS.items(), "precisions"):
        judge = _Judge(directory, precision)
        found = [judge.log_probs(prompt, answer) for prompt, answer in answers]
        if name == _REFERENCE:
            expected = found
        else:
            distances.append(distance(name, expected, found))
    return tuple(distances)


def _answers(directory: Path, max_tokens: int) -> list[Answer]:
    prompts = [each.token_ids for each in load_prompts(DEFAULT_PATH, Tokenizer(directory))]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(_MODEL, max_model_len=_MAX_MODEL_LEN, speculative_config="none") as llm:
        outputs = llm.generate([list(each) for each in prompts], params)
    return [
        (prompt, output.outputs[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Prints a line for each precision, and writes the JSON."""
    given = sys.argv[1:] if given is None else given
    options = _parser().parse_args(given)
    directory = resolve(_MODEL, progress=print_progress)
    answers = _answers(directory, options.max_tokens)
    report = PrecisionReport(
        command=command_line("benchmarks.precision", given),
        machine=describe_machine(),
        model=_MODEL,
        num_answers=len(answers),
        num_tokens=sum(len(answer) for _, answer in answers),
        distances=measure(directory, answers),
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
