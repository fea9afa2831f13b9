"""How many draft tokens each lossless verifier accepts, with one real target and several drafts.

The engine runs in process, on 8 prompts with several seeds each. At temperature 0 the verifiers are
the same one. Then, on the texts that came out, what it costs to draw drafts from a few of the most
likely tokens only (`benchmarks.draft_support`).

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
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculative import SpeculativeConfig
from specdec.distributed.group import TensorParallelGroup
from specdec.engine.engine import Engine
from specdec.models.config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import Request
from specdec.speculation.proposers import DraftModelProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling_params import SamplingParams, SpeculationOptions, VerifierName
from specdec.types.stats import SpeculationStats
from specdec.worker import LocalDraftWorker, LocalTarget, load_draft_runner, load_runner

_MODEL = "smollm2-135m-instruct"
_TEMPERATURES = (0.0, 0.6, 1.0)
_LOSSLESS: tuple[VerifierName, ...] = ("coupled", "rejection", "block")
_REMOVED_LAYERS = (12, 16, 20)
_FIRST_SEED = 1000
_MAX_MODEL_LEN, _BLOCK_SIZE = 768, 16


@dataclass(frozen=True)
class DraftKind:
    """A draft model: the target with other matrices, or with layers left out."""

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
    """Accepted per drafted token, with its standard error over the sequences."""

    draft: str
    temperature: float
    verifier: str
    acceptance_rate: float
    standard_error: float
    mean_acceptance_length: float
    num_draft_tokens: int


class Pair:
    """A target and a draft model in this process, with one engine for all runs."""

    def __init__(self, target: Path, draft: Path, kind: DraftKind, options: Any) -> None:
        """Loads both; `options` are those of the command line."""
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
        alone = TensorParallelGroup()
        self.target = load_runner(target, "float32", config, alone)
        self.draft = load_draft_runner(draft, "float32", limits, alone, kind.quantization)
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
        """Counts of each sequence, and what it says."""
        speculation = SpeculationOptions(verifier=verifier)
        stats, said = {}, {}
        for index in range(len(prompts) * self._num_seeds):
            prompt, seed = prompts[index % len(prompts)], _FIRST_SEED + index
            params = SamplingParams(
                temperature=temperature,
                max_tokens=self._max_tokens,
                ignore_eos=True,
                speculation=speculation,
            )
            said[str(index)] = Text(prompt.token_ids, [])
            self._engine.add(Request(str(index), prompt.token_ids, params, seed))
        while self._engine.has_work:
            for output in self._engine.step():
                stats[output.request_id] = output.speculation
                said[output.request_id].output_ids.extend(output.token_ids)
        return list(stats.values()), list(said.values())


def measure(options: Any, target: Path, kind: DraftKind) -> Iterator[Outcome | Support]:
    """Everything about one draft model."""
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
            some = texts[: len(prompts)]
            yield expected_acceptance(kind.name, temperature, pair.target, pair.draft, some)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, which is 0: figures are shown, not judged."""
    options = _parser().parse_args(arguments)
    target = resolve(_MODEL)
    started_at = time.monotonic()
    results: list[Outcome | Support] = []
    report: dict[str, Any] = {}
    for kind in _DRAFTS:
        results.extend(tqdm(measure(options, target, kind), kind.name, leave=False))
        report = _report(options, results, time.monotonic() - started_at)
        if options.output is not None:  # each time, so that what is done is kept
            _save(report, options.output)
    print(page(report))
    print(json.dumps(report))
    return 0


def _report(options: Any, results: Sequence[Outcome | Support], seconds: float) -> dict[str, Any]:
    return {
        "command": "make bench-acceptance",
        "machine": asdict(describe_machine()),
        "target": f"{_MODEL}, float32",
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "seconds": round(seconds),
        "outcomes": [asdict(each) for each in results if isinstance(each, Outcome)],
        "supports": [asdict(each) for each in results if isinstance(each, Support)],
    }


def _save(report: dict[str, Any], output: Path) -> None:
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page(report), encoding="utf-8")


def _without_layers(target: Path, scratch: Path, layers: tuple[int, ...]) -> Path:
    """The directory of a copy of the target that lacks some layers; the target's for none."""
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
        prog="benchmarks.acceptance", description="Compare what lossless verifiers accept."
    )
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-seeds", type=int, default=2, help="sequences of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--output", type=Path, help="where to save the JSON; a page goes beside it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
