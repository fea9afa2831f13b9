"""Check a real model against JSON schemas: with and without speculation, greedy and sampled.

Runs each schema of `benchmarks.json_schemas` at temperatures 0 and 1, without speculation, with
n-gram drafting and with an int8 copy of the model as its draft. An output that finishes must be
valid by jsonschema, 95 % must finish within 512 tokens, and speculation must not change a token.

    python -m benchmarks.structured_output [--output docs/benchmarks/structured-output.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jsonschema import ValidationError
from tqdm import tqdm

from benchmarks.json_schemas import CASES, SchemaCase
from benchmarks.machine import describe_machine
from benchmarks.report_file import add_output, write_text
from benchmarks.workloads import MODEL
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers import DraftModelProposer
from specdec.text.grammar import GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.types.request import ChatMessage
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SamplingParams, StructuredOutput
from specdec.worker import LocalDraftWorker, LocalTarget, load_draft_runner, load_runner

_METHODS: tuple[str | None, ...] = (None, "ngram", "draft_model")
_TEMPERATURES = (0.0, 1.0)
_DRAFT_TOKENS = 5
_MAX_TOKENS = 512
_MIN_ENDED_SHARE = 0.95
_NUM_BLOCKS = 2048
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024
_MAX_CATCH_UP = 256


@dataclass
class Output:
    """Output for one schema. problem: why a finished output is invalid; None if it is valid."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    has_ended: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Results of all schemas with one method at one temperature.

    changed: the schemas whose tokens differ from those without speculation.
    """

    method: str | None
    temperature: float
    num_outputs: int
    num_tokens: int
    num_ended: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    seconds: float
    invalid: dict[str, str]
    unfinished: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Return whether enough outputs finished, all are valid and none changed."""
        has_ended = self.num_ended >= _MIN_ENDED_SHARE * self.num_outputs
        return has_ended and not self.invalid and not self.changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.structured_output", description="Check a model against JSON schemas."
    )
    add_output(parser)
    options = parser.parse_args(arguments)
    directory = resolve(MODEL)
    outcomes = []
    for temperature in _TEMPERATURES:
        reference: list[Output] | None = None
        for method in _METHODS:
            outputs, outcome = _run(directory, method, temperature, reference)
            reference = reference or outputs
            outcomes.append(outcome)
            print(f"{'passed' if outcome.passed else 'FAILED'}: {outcome}", file=sys.stderr)
    report = {
        "model": MODEL,
        "num_schemas": len(CASES),
        "max_tokens": _MAX_TOKENS,
        "machine": asdict(describe_machine()),
        "passed": all(outcome.passed for outcome in outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    if options.output is not None:
        write_text(options.output, json.dumps(report, indent=2) + "\n")
    print(json.dumps({"passed": report["passed"], "num_schemas": len(CASES)}))
    return 0 if report["passed"] else 1


def _run(
    directory: Path,
    method: str | None,
    temperature: float,
    reference: list[Output] | None,
) -> tuple[list[Output], Outcome]:
    engine, make_request = _engine(directory, method)
    started_at = time.monotonic()
    for index, case in enumerate(CASES):
        engine.add(make_request(index, case, temperature))
    outputs = _generate(engine)
    seconds = time.monotonic() - started_at
    for case, output in zip(CASES, outputs, strict=True):
        output.problem = _problem(case, output)
    stats = engine.stats()
    pairs = zip(CASES, outputs, reference or outputs, strict=True)
    return outputs, Outcome(
        method=method,
        temperature=temperature,
        num_outputs=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        num_ended=sum(output.has_ended for output in outputs),
        num_steps=stats.counts.num_steps,
        num_draft_tokens=stats.counts.speculation.num_draft_tokens,
        num_accepted_tokens=stats.counts.speculation.num_accepted_tokens,
        seconds=round(seconds, 1),
        invalid={c.name: o.problem for c, o in zip(CASES, outputs, strict=True) if o.problem},
        unfinished=tuple(c.name for c, o in zip(CASES, outputs, strict=True) if not o.has_ended),
        changed=tuple(c.name for c, now, then in pairs if now.token_ids != then.token_ids),
    )


def _engine(
    directory: Path, method: str | None
) -> tuple[Engine, Callable[[int, SchemaCase, float], EngineRequest]]:
    """Return an engine in this process, and a factory of its requests."""
    config = EngineConfig(
        max_model_len=_MAX_MODEL_LEN,
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=16,
        max_queue_len=len(CASES),
        speculation=None if method is None else SpeculativeConfig.of(method, _DRAFT_TOKENS),
    )
    group, model = TensorParallelGroup(), ModelConfig.from_directory(directory)
    tokenizer = Tokenizer(directory)
    proposer = None
    if method == "draft_model":
        limits = DraftLimits(_NUM_BLOCKS, _BLOCK_SIZE, _MAX_MODEL_LEN, _MAX_CATCH_UP)
        runner = load_draft_runner(directory, "float32", limits, group, "int8")
        proposer = DraftModelProposer(LocalDraftWorker(runner), limits)
    target = LocalTarget(load_runner(directory, "float32", config, group))
    compiler = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)

    def make_request(index: int, case: SchemaCase, temperature: float) -> EngineRequest:
        question = ChatMessage("user", f"{case.prompt}. Answer with JSON only.")
        prompt = tuple(tokenizer.encode_chat([question]))
        spec = StructuredOutput(json_schema=case.text)
        params = SamplingParams(
            temperature=temperature, max_tokens=_MAX_TOKENS, structured_output=spec
        )
        grammar = compiler.compile(spec)
        return EngineRequest(prompt, params, request_id=str(index), seed=index, grammar=grammar)

    return Engine(config, model, target, tokenizer, proposer), make_request


def _generate(engine: Engine) -> list[Output]:
    """Run until all requests have finished; return the outputs by number of the request."""
    outputs = [Output() for _ in CASES]
    with tqdm(total=len(CASES), leave=False) as progress:
        while engine.has_work:
            for delta in engine.step():
                output = outputs[int(delta.request_id)]
                output.token_ids.extend(delta.token_ids)
                output.text += delta.text
                output.has_ended = delta.finish_reason is FinishReason.STOP
                if delta.error is not None:
                    output.problem = str(delta.error)
                progress.update(delta.finish_reason is not None or delta.error is not None)
    return outputs


def _problem(case: SchemaCase, output: Output) -> str | None:
    if output.problem is not None or not output.has_ended:
        return output.problem
    try:
        case.validate(output.text)
    except (ValueError, ValidationError) as error:
        return f"{output.text!r}: {error}".splitlines()[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
