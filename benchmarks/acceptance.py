"""Measure how many draft tokens each lossless verifier accepts, for one target and several drafts.

The engine runs in process, on 8 prompts with several seeds each. At temperature 0 all verifiers
behave the same. Then compute, on the generated texts, what acceptance costs when drafts are drawn
from the most likely tokens only (`benchmarks.draft_support`).

    python -m benchmarks.acceptance [--output docs/benchmarks/acceptance.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.acceptance_page import page
from benchmarks.draft_support import Support, Text, expected_acceptance
from benchmarks.machine import describe_machine
from benchmarks.prompts import DEFAULT_PATH, BenchmarkPrompt, load_prompts
from benchmarks.report_file import add_output, write_text
from benchmarks.workloads import MODEL
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers import DraftModelProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions, VerifierName
from specdec.worker import LocalDraftWorker, LocalTarget, load_draft_runner, load_runner

_TEMPERATURES = (0.0, 0.6, 1.0)
_LOSSLESS: tuple[VerifierName, ...] = ("coupled", "rejection", "block")
_REMOVED_LAYERS = (12, 16, 20)
_FIRST_SEED = 1000
_MAX_MODEL_LEN, _BLOCK_SIZE = 768, 16


@dataclass(frozen=True)
class DraftKind:
    """Draft model derived from the target: other matrices, or fewer layers."""

    name: str
    quantization: QuantizationMethod | None = None
    removed_layers: tuple[int, ...] = ()


_DRAFTS = (
    DraftKind("int8", "int8"),
    DraftKind("w8a8", "w8a8"),
    DraftKind(f"without layers {', '.join(map(str, _REMOVED_LAYERS))}", None, _REMOVED_LAYERS),
)


@dataclass(frozen=True)
class Outcome:
    """Acceptance rate of one run, with its standard error over the sequences."""

    draft: str
    temperature: float
    verifier: str
    acceptance_rate: float
    standard_error: float
    mean_acceptance_length: float
    num_draft_tokens: int


class Pair:
    """Target and draft model in this process, with one engine for all runs."""

    def __init__(self, target: Path, draft: Path, kind: DraftKind, options: Any) -> None:
        """Load both models; `options` are the parsed command line options."""
        self._num_seeds, self._max_tokens = options.num_seeds, options.max_tokens
        num_seqs = options.num_prompts * options.num_seeds
        num_blocks = num_seqs * _MAX_MODEL_LEN // _BLOCK_SIZE
        config = EngineConfig(
            max_model_len=_MAX_MODEL_LEN,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2 * num_seqs * (1 + options.num_speculative_tokens),
            speculation=SpeculativeConfig.of(num_speculative_tokens=options.num_speculative_tokens),
        )
        limits = DraftLimits(num_blocks, _BLOCK_SIZE, _MAX_MODEL_LEN, max_catch_up_tokens=512)
        group = TensorParallelGroup()
        self.target = load_runner(target, "float32", config, group)
        self.draft = load_draft_runner(draft, "float32", limits, group, kind.quantization)
        self._engine = Engine(
            config,
            ModelConfig.from_directory(target),
            LocalTarget(self.target),
            Tokenizer(target),
            DraftModelProposer(LocalDraftWorker(self.draft), limits),
        )

    def run(
        self, prompts: Sequence[BenchmarkPrompt], temperature: float, verifier: VerifierName
    ) -> tuple[list[SpeculationStats], list[Text]]:
        """Return the speculation counts of each sequence, and the generated texts."""
        speculation = SpeculationOptions(verifier=verifier)
        stats, texts = {}, {}
        for index in range(len(prompts) * self._num_seeds):
            prompt, seed = prompts[index % len(prompts)], _FIRST_SEED + index
            params = SamplingParams(
                temperature=temperature,
                max_tokens=self._max_tokens,
                ignore_eos=True,
                speculation=speculation,
            )
            texts[str(index)] = Text(prompt.token_ids, [])
            self._engine.add(
                EngineRequest(prompt.token_ids, params, request_id=str(index), seed=seed)
            )
        while self._engine.has_work:
            for output in self._engine.step():
                stats[output.request_id] = output.speculation
                texts[output.request_id].output_ids.extend(output.token_ids)
        return list(stats.values()), list(texts.values())


def measure(options: Any, target: Path, kind: DraftKind) -> Iterator[Outcome | Support]:
    """Yield all results of one draft model."""
    prompts = load_prompts(DEFAULT_PATH, Tokenizer(target))[: options.num_prompts]
    with tempfile.TemporaryDirectory() as scratch:
        draft = _without_layers(target, Path(scratch), kind.removed_layers)
        pair = Pair(target, draft, kind, options)
    for temperature in _TEMPERATURES:
        texts: list[Text] = []
        for verifier in _LOSSLESS if temperature else _LOSSLESS[:1]:
            stats, texts = pair.run(prompts, temperature, verifier)
            yield _outcome(kind.name, temperature, verifier, stats)
        if temperature:
            one_seed = texts[: len(prompts)]
            yield expected_acceptance(kind.name, temperature, pair.target, pair.draft, one_seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return exit status 0; no figure is enforced."""
    options = _parser().parse_args(arguments)
    target = resolve(MODEL)
    started_at = time.monotonic()
    results: list[Outcome | Support] = []
    report: dict[str, Any] = {}
    for kind in _DRAFTS:
        results.extend(tqdm(measure(options, target, kind), kind.name, leave=False))
        report = _report(options, results, time.monotonic() - started_at)
        if options.output is not None:  # save after each draft: an aborted run keeps its results
            write_text(options.output, json.dumps(report, indent=2) + "\n")
            write_text(options.output.with_suffix(".md"), page(report))
    print(page(report))
    print(json.dumps(report))
    return 0


def _report(options: Any, results: Sequence[Outcome | Support], seconds: float) -> dict[str, Any]:
    return {
        "command": "make bench-acceptance",
        "machine": asdict(describe_machine()),
        "target": f"{MODEL}, float32",
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "seconds": round(seconds),
        "outcomes": [asdict(each) for each in results if isinstance(each, Outcome)],
        "supports": [asdict(each) for each in results if isinstance(each, Support)],
    }


def _without_layers(target: Path, scratch: Path, layers: tuple[int, ...]) -> Path:
    """Return a directory with the target less these layers; the target's own if there are none."""
    if not layers:
        return target
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in layers]
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(target).save_pretrained(scratch)
    return scratch


def _outcome(
    draft: str, temperature: float, verifier: VerifierName, stats: Sequence[SpeculationStats]
) -> Outcome:
    total = SpeculationStats.sum(stats)
    rate = total.acceptance_rate
    excesses = [each.num_accepted_tokens - rate * each.num_draft_tokens for each in stats]
    spread = statistics.stdev(excesses) * len(stats) ** 0.5
    return Outcome(
        draft=draft,
        temperature=temperature,
        verifier=verifier,
        acceptance_rate=round(rate, 4),
        standard_error=round(spread / total.num_draft_tokens, 4),
        mean_acceptance_length=round(total.mean_acceptance_length, 3),
        num_draft_tokens=total.num_draft_tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.acceptance", description="Compare the acceptance of lossless verifiers."
    )
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-seeds", type=int, default=2, help="sequences per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
