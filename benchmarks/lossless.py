"""Verify, through the running service, that speculation and sharding never change a token.

Greedy: the token ids equal those of transformers in fp32, with speculation off and on, with each
method, at each tensor-parallel size, with 16 concurrent streams. Sampled at temperature 0.8 with a
seed: the token ids are equal with speculation off and on with 1, 3 and 7 draft tokens, alone and in
a batch of 8, and they are those defined by transformers' logits and the request's noise. Only a few
differences are allowed, and only ties (see `benchmarks.ties`).

KV memory and step size of the services are so small that sequences are preempted and prompts are
chunked, and prompts repeat, so that the prefix cache is used.

    python -m benchmarks.lossless [--tensor-parallel 1 2 3] [--methods ngram draft_model]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.prompts import BenchmarkPrompt, add_prompts_option, load_prompts
from benchmarks.reference import TransformersReference
from benchmarks.report_file import add_output, write_text
from benchmarks.service import ServiceProcess, started_service
from benchmarks.steered import steer
from benchmarks.streams import Answer, Call, speculation_options, stream_all
from benchmarks.ties import Difference, Reference, argmax_differences, first_difference
from benchmarks.workloads import MODEL
from specdec.client import AdminClient
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationChange
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams

_MIN_IDENTICAL_SHARE = 0.95

_GREEDY_STREAMS = 16
_GREEDY_DRAFT_TOKENS = (0, 3)

_SAMPLED_PROMPTS = 8
_SAMPLED_STREAMS = (1, 8)
_SAMPLED_DRAFT_TOKENS = (0, 1, 3, 7)
_SAMPLED_TENSOR_PARALLEL = (1, 2)
_TEMPERATURE = 0.8
_FIRST_SEED = 1000

_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "quantization": "int8"},
}
_TIGHT: Mapping[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 128}
_EVENTS = ("num_preemptions", "prefill_chunks", "prompt_tokens_cached")
"""Counters that must be positive in each service, otherwise the test did not exercise them."""

_KV_GIB_PER_MODEL = 0.08  # about 115 blocks; one sequence of max_model_len needs 64


@dataclass(frozen=True)
class Configuration:
    """Generation settings. num_draft_tokens: 0 disables speculation, whatever the method."""

    method: str
    temperature: float
    tensor_parallel_size: int
    num_draft_tokens: int
    num_streams: int

    def __str__(self) -> str:
        drafts = f"{self.method} {self.num_draft_tokens}" if self.num_draft_tokens else "off"
        return (
            f"temperature {self.temperature:g}, tp {self.tensor_parallel_size}, "
            f"speculation {drafts}, {self.num_streams} streams"
        )


@dataclass(frozen=True)
class Outcome:
    """Comparison of the outputs of one configuration with their references."""

    name: str
    num_outputs: int
    num_identical: int
    differences: tuple[Difference, ...]
    speculation: SpeculationStats
    drafts_as_asked: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether differences are few and all ties, and drafts exactly as requested."""
        are_few = self.num_identical >= int(_MIN_IDENTICAL_SHARE * self.num_outputs)
        return are_few and self.drafts_as_asked and all(each.is_tie for each in self.differences)


class LosslessCheck:
    """Comparison of configurations across services, with shared references."""

    def __init__(
        self, prompts: Sequence[BenchmarkPrompt], max_tokens: int, reference: TransformersReference
    ) -> None:
        """Compute the greedy references, which takes minutes."""
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._reference = reference
        self._greedy = [
            reference.greedy(prompt.prompt_id, prompt.token_ids, max_tokens)
            for prompt in tqdm(prompts, "transformers, greedy", leave=False)
        ]
        self._sampled: list[Reference] = []

    def run(self, address: str, method: str, tensor_parallel_size: int) -> Iterator[Outcome]:
        """Yield the outcome of each configuration of one method and tensor-parallel size."""
        for drafts in _GREEDY_DRAFT_TOKENS:
            yield self._compare(
                address, Configuration(method, 0, tensor_parallel_size, drafts, _GREEDY_STREAMS)
            )
        if tensor_parallel_size not in _SAMPLED_TENSOR_PARALLEL:
            return
        if not self._sampled:
            yield self._define_sampled(address, tensor_parallel_size)
        for streams in _SAMPLED_STREAMS:
            for drafts in _SAMPLED_DRAFT_TOKENS:
                yield self._compare(
                    address,
                    Configuration(method, _TEMPERATURE, tensor_parallel_size, drafts, streams),
                )

    def _compare(self, address: str, configuration: Configuration) -> Outcome:
        started_at = time.monotonic()
        answers = self._answers(address, configuration)
        references = self._greedy if configuration.temperature == 0 else self._sampled
        differences = [
            difference
            for reference, answer in zip(references, answers, strict=True)
            if (difference := first_difference(reference, answer.token_ids)) is not None
        ]
        speculation = SpeculationStats.sum(each.speculation for each in answers)
        return Outcome(
            name=str(configuration),
            num_outputs=len(answers),
            num_identical=len(answers) - len(differences),
            differences=tuple(differences),
            speculation=speculation,
            drafts_as_asked=(speculation.num_drafts > 0) == (configuration.num_draft_tokens > 0),
            seconds=time.monotonic() - started_at,
        )

    def _define_sampled(self, address: str, tensor_parallel_size: int) -> Outcome:
        """Take a run without speculation as the reference; verify it with transformers."""
        started_at = time.monotonic()
        plain = Configuration("ngram", _TEMPERATURE, tensor_parallel_size, 0, num_streams=1)
        answers = self._answers(address, plain)
        for index in tqdm(range(len(answers)), "transformers, sampled", leave=False):
            prompt, seed = self._prompts[index], _FIRST_SEED + index
            self._sampled.append(
                self._reference.sampled(
                    prompt.prompt_id, prompt.token_ids, answers[index].token_ids, _TEMPERATURE, seed
                )
            )
        differences = [argmax_differences(reference) for reference in self._sampled]
        return Outcome(
            name=f"temperature {_TEMPERATURE:g}, recomputed from transformers' logits",
            num_outputs=len(answers),
            num_identical=sum(not each for each in differences),
            differences=tuple(each for some in differences for each in some),
            speculation=SpeculationStats.sum(each.speculation for each in answers),
            drafts_as_asked=True,
            seconds=time.monotonic() - started_at,
        )

    def _answers(self, address: str, configuration: Configuration) -> list[Answer]:
        prompts = self._prompts
        if configuration.temperature > 0:
            prompts = prompts[:_SAMPLED_PROMPTS]
        calls = [
            Call(
                prompt.token_ids,
                SamplingParams(
                    temperature=configuration.temperature,
                    top_p=1.0,  # the model's own default is smaller
                    seed=_FIRST_SEED + index,
                    max_tokens=self._max_tokens,
                    speculation=speculation_options(
                        configuration.num_draft_tokens, configuration.method
                    ),
                ),
            )
            for index, prompt in enumerate(prompts)
        ]
        return stream_all(address, calls, configuration.num_streams, str(configuration))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all comparisons; return 0 if each configuration passed."""
    options = _parser().parse_args(arguments)
    directory = resolve(MODEL)
    prompts = load_prompts(options.prompts, Tokenizer(directory))
    check = LosslessCheck(
        prompts[: options.num_prompts], options.max_tokens, TransformersReference(directory)
    )
    outcomes: list[Outcome] = []
    events: dict[str, dict[str, int]] = {}
    report: dict[str, Any] = {}
    for size, method in product(options.tensor_parallel, options.methods):
        with _service(method, size) as service:
            with AdminClient(service.address) as admin:  # drafts must run even where they cost time
                steer(admin, SpeculationChange(mode="on"))
            for outcome in check.run(service.address, method, size):
                _print_outcome(outcome)
                outcomes.append(outcome)
            events[f"tp {size}, {method}"] = service.counters(*_EVENTS)
            _print_events(events[f"tp {size}, {method}"])
        report = _report(outcomes, events)
        if options.output is not None:  # save after each service: an aborted run keeps its results
            write_text(options.output, json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def _service(method: str, tensor_parallel_size: int) -> AbstractContextManager[ServiceProcess]:
    num_models = 2 if method == "draft_model" else 1
    return started_service(
        MODEL,
        tensor_parallel_size=tensor_parallel_size,
        speculative_config=SpeculativeConfig.of(**_METHODS[method]),
        kv_cache_memory_gib=num_models * _KV_GIB_PER_MODEL,
        **_TIGHT,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lossless", description="Compare token ids with and without speculation."
    )
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2, 3], metavar="SIZE")
    parser.add_argument("--methods", nargs="+", default=list(_METHODS), choices=list(_METHODS))
    add_prompts_option(parser)
    parser.add_argument("--num-prompts", type=int, default=40, help="number of prompts to use")
    parser.add_argument("--max-tokens", type=int, default=64)
    add_output(parser)
    return parser


def _print_events(counts: Mapping[str, int]) -> None:
    absent = [name for name, count in counts.items() if count == 0]
    verdict = "FAIL" if absent else "pass"
    reason = f"; more prompts or tokens are needed for {', '.join(absent)}" if absent else ""
    events = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{verdict}   events: {events}{reason}", flush=True)


def _print_outcome(outcome: Outcome) -> None:
    verdict = "pass" if outcome.passed else "FAIL"
    speculation = outcome.speculation
    drafts = (
        f"{speculation.acceptance_rate:4.0%} of {speculation.num_draft_tokens:5d} drafts accepted"
        if speculation.num_drafts
        else "no drafts"
    )
    print(
        f"{verdict}  {outcome.num_identical:2d}/{outcome.num_outputs:2d} identical  "
        f"{outcome.name:55s}  {drafts:31s}  {outcome.seconds:4.0f} s"
    )
    for difference in outcome.differences:
        print(f"      {difference}", flush=True)


def _report(outcomes: Sequence[Outcome], events: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    events_occurred = all(count > 0 for counts in events.values() for count in counts.values())
    return {
        "passed": events_occurred and all(outcome.passed for outcome in outcomes),
        "machine": asdict(describe_machine()),
        "events": events,
        "outcomes": [{"passed": outcome.passed, **asdict(outcome)} for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())
