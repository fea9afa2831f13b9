"""Measure acceptance of a draft model with another vocabulary, by text and by shared tokens.

The draft model has the target's weights and a tokenizer with only the first of its merges and
permuted ids, so the vocabulary is the only difference. Both ways are measured at both temperatures,
also where the service would select the other one (docs/adr/0010).

    python -m benchmarks.other_vocabulary [--output docs/benchmarks/other-vocabulary.json]

Prints a table, and one line of JSON at the end. Exits with 1 if speculation changed a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.prompts import DEFAULT_PATH, load_prompts
from benchmarks.report_file import add_output, markdown_table, write_report
from benchmarks.workloads import MODEL
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers import DraftModelProposer, DraftVocabulary
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LocalDraftWorker, LocalTarget, load_draft_runner, load_runner

_NUM_MERGES = (4_000, 16_000)
_TEMPERATURES = (0.0, 0.8)
_SUITES = ("mt_bench", "humaneval", "gsm8k")
_EMBEDDING = "model.embed_tokens.weight"
_MAX_MODEL_LEN, _NUM_BLOCKS, _BLOCK_SIZE = 768, 384, 16

Way = Literal["text", "shared tokens"]
_WAYS: tuple[Way, ...] = ("text", "shared tokens")
_WAY_SELECTORS = (
    "specdec.speculation.proposers.cross_vocab.vocab_adapter.drafts_text",
    "specdec.worker.draft_model_runner.drafts_text",
)
"""Functions to patch, because the service offers no option for the way."""


@dataclass(frozen=True)
class Row:
    """One draft model, temperature and way, over all prompts."""

    num_shared: int
    temperature: float
    way: Way
    acceptance_rate: float
    mean_acceptance_length: float
    num_draft_tokens: int
    is_lossless: bool


class _Bench:
    """Target, loaded once, with its outputs without speculation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.directory = resolve(MODEL)
        self._options = options
        self._tokenizer = Tokenizer(self.directory)
        self._model = ModelConfig.from_directory(self.directory)
        prompts = load_prompts(DEFAULT_PATH, self._tokenizer)
        self._prompts = [
            prompt.token_ids
            for suite in _SUITES
            for prompt in [each for each in prompts if each.suite == suite][: options.num_prompts]
        ]
        speculation = SpeculativeConfig.of(num_speculative_tokens=options.num_draft_tokens)
        self._config = EngineConfig(
            _MAX_MODEL_LEN, _NUM_BLOCKS, _BLOCK_SIZE, speculation=speculation
        )
        group = TensorParallelGroup()
        self._target = LocalTarget(load_runner(self.directory, "float32", self._config, group))
        self._plain = {each: self._run(each, None)[0] for each in _TEMPERATURES}

    def rows(self, draft: Path) -> list[Row]:
        """Return the results of one draft model at each temperature and way."""
        vocabulary = DraftVocabulary.between(draft, self.directory)
        assert vocabulary.shared is not None, "the vocabularies are equal"
        limits = DraftLimits(_NUM_BLOCKS, _BLOCK_SIZE, _MAX_MODEL_LEN, max_catch_up_tokens=256)
        group = TensorParallelGroup()
        runner = load_draft_runner(draft, "float32", limits, group, vocabulary=vocabulary.shared)
        rows = []
        for temperature in _TEMPERATURES:
            for way in _WAYS:
                # A new proposer per run: the sequences of each run reuse the same ids.
                adapter = vocabulary.new_adapter()
                proposer = DraftModelProposer(LocalDraftWorker(runner), limits, adapter)
                with _drafting_by(way):
                    outputs, speculation = self._run(temperature, proposer)
                is_lossless = outputs == self._plain[temperature]
                num_shared = vocabulary.shared.num_shared
                rows.append(_row(num_shared, temperature, way, speculation, is_lossless))
        return rows

    def _run(
        self, temperature: float, proposer: DraftModelProposer | None
    ) -> tuple[dict[str, list[int]], SpeculationStats]:
        """Return the output tokens by request, and the speculation counts."""
        engine = Engine(self._config, self._model, self._target, self._tokenizer, proposer)
        params = SamplingParams(temperature=temperature, max_tokens=self._options.max_tokens)
        outputs: dict[str, list[int]] = {str(index): [] for index in range(len(self._prompts))}
        for name, prompt in zip(outputs, self._prompts, strict=True):
            engine.add(EngineRequest(prompt, params, request_id=name, seed=int(name)))
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id].extend(output.token_ids)
        return outputs, engine.stats().counts.speculation


@contextmanager
def _drafting_by(way: Way) -> Iterator[None]:
    """Draft in this way at all temperatures while the context lasts."""
    with ExitStack() as stack:
        for chooser in _WAY_SELECTORS:
            stack.enter_context(patch(chooser, lambda rules: way == "text"))
        yield


def _row(
    num_shared: int, temperature: float, way: Way, stats: SpeculationStats, is_lossless: bool
) -> Row:
    return Row(
        num_shared=num_shared,
        temperature=temperature,
        way=way,
        acceptance_rate=round(stats.acceptance_rate, 3),
        mean_acceptance_length=round(stats.mean_acceptance_length, 3),
        num_draft_tokens=stats.num_draft_tokens,
        is_lossless=is_lossless,
    )


def _with_merges(source: Path, directory: Path, num_merges: int) -> Path:
    """Write a copy of a model whose tokenizer has only the first merges, with permuted ids."""
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    added = {each["content"]: each["id"] for each in raw["added_tokens"]}
    known, merges = raw["model"]["vocab"], raw["model"]["merges"][:num_merges]
    made = ["".join(each) if isinstance(each, list) else each.replace(" ", "") for each in merges]
    names = [*added, *(token for token in known if len(token) == 1), *made]
    old_ids = {name: added.get(name, known.get(name)) for name in dict.fromkeys(names)}
    order = torch.randperm(len(old_ids), generator=torch.Generator().manual_seed(1)).tolist()
    new_ids = dict(zip(old_ids, order, strict=True))
    raw["model"]["merges"] = merges
    raw["model"]["vocab"] = new_ids
    for token in raw["added_tokens"]:
        token["id"] = new_ids[token["content"]]
    (directory / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    _copy_config(source, directory, {old_ids[name]: new_ids[name] for name in old_ids})
    weights = load_file(source / "model.safetensors")
    rows = sorted(old_ids, key=new_ids.__getitem__)
    weights[_EMBEDDING] = weights[_EMBEDDING][[old_ids[name] for name in rows]]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _copy_config(source: Path, directory: Path, new_ids: dict[int, int]) -> None:
    for path in source.glob("*.json"):
        if path.name in ("config.json", "generation_config.json"):
            values = json.loads(path.read_text(encoding="utf-8"))
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if isinstance(values.get(key), int):
                    values[key] = new_ids[values[key]]
            if "vocab_size" in values:
                values["vocab_size"] = len(new_ids)
            (directory / path.name).write_text(json.dumps(values), encoding="utf-8")
        elif path.name != "tokenizer.json":
            (directory / path.name).write_bytes(path.read_bytes())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if each run has the target's own tokens."""
    options = _parser().parse_args(arguments)
    bench, rows = _Bench(options), list[Row]()
    for num_merges in tqdm(_NUM_MERGES, "draft models", leave=False):
        with tempfile.TemporaryDirectory() as scratch:
            rows += bench.rows(_with_merges(bench.directory, Path(scratch), num_merges))
    columns = ("shared tokens", "temperature", "way", "acceptance rate", "mean acceptance length")
    print(markdown_table(columns, map(_cells, rows)))
    report = {
        "machine": asdict(describe_machine()),
        "model": MODEL,
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "rows": [asdict(row) for row in rows],
    }
    write_report(report, options.output)
    return 0 if all(row.is_lossless for row in rows) else 1


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.num_shared:,}",
        f"{row.temperature:g}",
        row.way,
        f"{row.acceptance_rate:.2f}",
        f"{row.mean_acceptance_length:.2f}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.other_vocabulary",
        description="Compare ways to draft with another vocabulary.",
    )
    parser.add_argument("--num-prompts", type=int, default=2, help="prompts per suite")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
