"""Measure one stream whose drafts a head makes, against the time of target and head alone.

SmolLM2 in int8 with a random EAGLE-3 head; the verifier `synthetic` accepts a draft token with
probability 0.8. A service that begins steps ahead, one that does not, and a rank alone, which runs
the same steps in a loop without an engine, take turns. Prefill does not count.

Two ratios to the rank alone are printed: seconds of a step, and tokens per second over (expected
tokens of a step / seconds of a step of the rank alone). They differ by how far the tokens per step
that were drawn are from the expected ones, so the first one has the limit. Each round has another
prompt and seed, and so draws other tokens. The last line printed is JSON.

    python -m benchmarks.held_drafts [--rounds 10] [--max-tokens 256] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.random_heads import write_eagle3
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.streams import Call, timed_streams
from benchmarks.summary import Bar, at_least, print_bars
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, Contender, Measurement, StreamRecord, Workload, one_by_one
from specdec.config.engine import EngineConfig, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from specdec.worker import HeadFiles, load_runner

NUM_DRAFTS = 4
ACCEPTANCE = 0.8
AHEAD, BEHIND, ALONE = "steps begun ahead", "one step after the other", "rank alone"

_LEAST_SHARE = 0.9
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class HeldRow:
    """Medians of a case, and its mean tokens per message.

    step_share: seconds of a step of the rank alone over those of a message. share: tokens per
    second over the expected ones of the rank alone; step_share * drawn / expected tokens of a step.
    """

    case: str
    tokens_per_s: float
    ms_per_message: float
    tokens_per_message: float
    step_share: float
    share: float


@dataclass(frozen=True)
class HeldReport:
    """Complete results. gain: tokens per second of steps begun ahead over those that are not."""

    command: str
    machine: Machine
    model: str
    num_draft_tokens: int
    acceptance: float
    expected_tokens: float
    rows: tuple[HeldRow, ...]
    gain: float
    bars: tuple[Bar, ...]


class RankAlone:
    """A rank with target and head, and a loop that sends it one step after the other."""

    def __init__(
        self,
        directory: Path,
        head: Path,
        quantization: QuantizationMethod | None = "int8",
        kernels: Kernels = "native",
    ) -> None:
        """Load both models."""
        num_blocks = _MAX_MODEL_LEN // _BLOCK_SIZE
        config = EngineConfig(
            max_model_len=_MAX_MODEL_LEN, num_blocks=num_blocks, block_size=_BLOCK_SIZE
        )
        self._table = BlockTableDelta(0, 0, tuple(range(num_blocks)))
        self._runner = load_runner(
            directory,
            "float32",
            config,
            TensorParallelGroup(),
            quantization,
            kernels=kernels,
            head=HeadFiles(head),
        )

    def measure(self, workload: Workload) -> Measurement:
        """Run the prompts one after the other."""
        started_at = time.perf_counter()
        streams = tuple(self._stream(prompt, workload.max_tokens) for prompt in workload.prompts)
        return Measurement(time.perf_counter() - started_at, streams, None)

    def _stream(self, prompt: tuple[int, ...], max_tokens: int) -> StreamRecord:
        started_at, token_ids, arrivals_s = time.perf_counter(), list[int](), list[float]()
        for new in self._steps(prompt):
            token_ids.extend(new)
            arrivals_s.append(time.perf_counter() - started_at)
            if len(token_ids) >= max_tokens:
                break
        self._runner.execute(StepInput(0, (0,), (), (), ()))
        return StreamRecord(tuple(token_ids), tuple(arrivals_s))

    def _steps(self, prompt: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of one step after the other."""
        rates = (ACCEPTANCE,) * NUM_DRAFTS
        rules = SamplingRules(
            temperature=0.0,
            seed=seed_of(prompt),
            verifier=Verifier("synthetic", synthetic_rates=rates),
        )
        admission = SequenceAdmission(0, len(prompt), rules, prompt)
        row = StepRow(0, 0, prompt, 0, True, num_next_drafts=NUM_DRAFTS)
        step = StepInput(0, (), (admission,), (self._table,), (row,))
        while True:
            (verified,) = self._runner.execute(step).rows
            yield verified.token_ids
            drafts, end = verified.next_draft_token_ids, row.known_end + len(verified.token_ids)
            tokens = (verified.token_ids[-1], *drafts)
            row = StepRow(0, end - 1, tokens, len(drafts), True, num_next_drafts=NUM_DRAFTS)
            step = StepInput(0, (), (), (), (row,))


class SeededService:
    """A service, with the seeds of the rank alone: acceptance depends on them."""

    def __init__(self, address: str) -> None:
        self._address = address

    def measure(self, workload: Workload) -> Measurement:
        """Run the prompts one after the other."""
        calls = [Call(each, _params(each, workload.max_tokens)) for each in workload.prompts]
        seconds, answers = timed_streams(self._address, calls, workload.num_open)
        streams = tuple(StreamRecord(each.token_ids, each.arrivals_s) for each in answers)
        return Measurement(seconds, streams, None)


def _params(prompt: tuple[int, ...], max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, seed=seed_of(prompt), max_tokens=max_tokens, ignore_eos=True
    )


def seed_of(prompt: tuple[int, ...]) -> int:
    """Return the seed of a prompt: with one for all, all rounds would draw the same acceptance."""
    return sum(prompt)


def expected_tokens() -> float:
    """Return the mean number of tokens of a step, the target's own included."""
    return sum(ACCEPTANCE**count for count in range(NUM_DRAFTS + 1))


def summarize(measured: Measured) -> tuple[HeldRow, ...]:
    """Return the medians of all cases; shares are computed within each round."""
    alone_s = [each.decoding.mean_gap_s for each in measured[ALONE]]
    return tuple(_row(case, each, alone_s) for case, each in measured.items())


def gain(measured: Measured) -> float:
    """Return the median of tokens per second of steps begun ahead over those that are not."""
    return statistics.median(
        ahead.decoding.tokens_per_s / behind.decoding.tokens_per_s
        for ahead, behind in zip(measured[AHEAD], measured[BEHIND], strict=True)
    )


def bars(rows: Sequence[HeldRow]) -> tuple[Bar, ...]:
    """Return the shares that have a limit: of tokens per second, and of a step alone.

    The first also has the draw of the acceptance in it, the second has not.
    """
    row = next(each for each in rows if each.case == AHEAD)
    tokens = f"{AHEAD}: tokens/s / (expected tokens / seconds of target and head)"
    step = f"{AHEAD}: seconds of target and head / seconds of a step"
    return (
        at_least(tokens, row.share, _LEAST_SHARE),
        at_least(step, row.step_share, _LEAST_SHARE),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, the bar and one line of JSON; return exit status 0: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    with TemporaryDirectory() as directory:
        measured = measure(options, Path(directory))
    rows = summarize(measured)
    print(f"{'':28}{'tokens/s':>10}{'ms/step':>10}{'tokens':>8}{'of step':>10}{'of tokens/s':>13}")
    for row in rows:
        print(
            f"{row.case:28}{row.tokens_per_s:10.1f}{row.ms_per_message:10.3f}"
            f"{row.tokens_per_message:8.2f}{row.step_share:10.1%}{row.share:13.1%}"
        )
    print(f"expected tokens of a step: {expected_tokens():.2f}")
    report = HeldReport(
        command_line("benchmarks.held_drafts", given),
        describe_machine(),
        MODEL,
        NUM_DRAFTS,
        ACCEPTANCE,
        expected_tokens(),
        rows,
        gain(measured),
        bars(rows),
    )
    print_bars(report.bars)
    write_report(report, options.output)
    return 0


def measure(options: argparse.Namespace, directory: Path) -> Measured:
    """Start both services and the rank, and measure in rounds; `directory` receives the head."""
    torch.manual_seed(0)
    model = resolve(MODEL, progress=print_progress)
    head = write_eagle3(directory / "eagle3", ModelConfig.from_directory(model))
    prompts = of_similar_length(load_prompts(options.prompts, Tokenizer(model)), options.rounds)
    workloads = one_by_one(prompts, options.max_tokens)
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            name: SeededService(
                stack.enter_context(
                    started_service(MODEL, **_settings(head, name == AHEAD))
                ).address
            )
            for name in (AHEAD, BEHIND)
        }
        alone = Worker(partial(RankAlone, head=head), model)
        contenders[ALONE] = stack.enter_context(alone)
        cases = [Case(name, name, workloads) for name in contenders]
        warm_up(contenders, cases)
        return measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)


def _settings(head: Path, is_ahead: bool) -> dict[str, object]:
    return {
        "dtype": "float32",
        "quantization": "int8",
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "kv_cache_memory_gib": 0.25,
        "async_scheduling": is_ahead,
        "allow_synthetic_acceptance": True,
        "speculative_config": SpeculativeConfig.of(
            "eagle3",
            NUM_DRAFTS,
            model=str(head),
            policy="threshold",
            verifier="synthetic",
            synthetic_acceptance_rate=ACCEPTANCE,
        ),
    }


def _row(case: str, measurements: Sequence[Measurement], alone_s: Sequence[float]) -> HeldRow:
    """Return the medians of a case. alone_s: seconds of a step of the rank alone in each round."""
    decoded = [each.decoding for each in measurements]
    pairs = list(zip(decoded, alone_s, strict=True))
    return HeldRow(
        case,
        statistics.median(each.tokens_per_s for each in decoded),
        1e3 * statistics.median(each.mean_gap_s for each in decoded),
        sum(each.num_tokens for each in decoded) / sum(each.num_messages for each in decoded),
        statistics.median(step_s / each.mean_gap_s for each, step_s in pairs),
        statistics.median(each.tokens_per_s * step_s / expected_tokens() for each, step_s in pairs),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.held_drafts", description="Measure drafts that the ranks hold."
    )
    add_round_options(parser, 10)
    parser.set_defaults(max_tokens=256)
    add_prompts_option(parser)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
