"""Engines for tests: the real engine on the tiny model, and on a target without a model."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from specdec.config.engine import (
    DEFAULT_MODEL_OPTIONS,
    DraftLimits,
    EngineConfig,
    Kernels,
    ModelOptions,
)
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.metrics.metrics import StepRecorder
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.decode_rows import SampledTokens
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import (
    DraftModelProposer,
    DraftRequest,
    DraftVocabulary,
    Proposal,
    Proposer,
    SentRow,
)
from specdec.types.adapters import AdapterSource
from specdec.types.errors import SpecdecError
from specdec.types.messages import Logprobs, StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.types.ranks import Target
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import (
    HeadFiles,
    LocalDraftWorker,
    LocalTarget,
    RankModel,
    load_draft,
    load_target,
)
from tests.specdec.shared_tokenizers import tokenizer_of

Adapter = Path | None


def engine_config(num_draft_tokens: int = 0, **changes: object) -> EngineConfig:
    """Return a configuration with small limits; 0 draft tokens: no speculation."""
    speculation = (
        SpeculativeConfig.of(num_speculative_tokens=num_draft_tokens, prompt_lookup_min=1)
        if num_draft_tokens
        else None
    )
    values: dict[str, object] = {
        "max_model_len": 160,
        "num_blocks": 200,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "speculation": speculation,
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def frozen() -> float:
    """Return the time of a clock that stands: no decision depends on measured times."""
    return 0.0


def local_engine(
    directory: Path,
    config: EngineConfig,
    group: TensorParallelGroup | None = None,
    proposer: Proposer | None = None,
    policy: SpeculationPolicy | None = None,
    quantization: QuantizationMethod | None = None,
    head: HeadFiles | None = None,
    kernels: Kernels = "auto",
    drafters: DrafterVersions | None = None,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    draft_adapters: Mapping[str, Path] = MappingProxyType({}),
    options: ModelOptions = DEFAULT_MODEL_OPTIONS,
) -> Engine:
    """Make the real engine with the model, and a draft head, in this process.

    adapters: directories to load before the first request, by name. draft_adapters: those of the
    draft model, likewise.

    Ranks that are threads each run a whole engine; with a `frozen` clock it is deterministic, so
    they agree.
    """
    spec = RankModel(
        directory, "float32", config, quantization, kernels=kernels, head=head, options=options
    )
    runner = load_target(spec, group or TensorParallelGroup())
    target = LocalTarget(runner)
    engine = make_engine(
        directory, config, target, proposer, policy, clock=frozen, drafters=drafters
    )
    for name, path in adapters.items():
        load_adapter(engine, name, path, draft=draft_adapters.get(name))
    return engine


def load_adapter(
    engine: Engine, name: str, path: Adapter, *, replaces: bool = False, draft: Adapter = None
) -> int:
    """Load an adapter, and its counterpart, on a local target after a step; return its id."""
    adapters = engine.adapters
    assert adapters is not None
    own, counterpart = (each and AdapterSource(str(each), str(each)) for each in (path, draft))
    adapter_id = adapters.load(name, own, 1, replaces=replaces, draft=counterpart)
    engine.advance_adapters()
    assert adapters.fault_of(adapter_id) in ("", None)
    return adapter_id


def with_adapter(engine: Engine, each: EngineRequest, name: str) -> EngineRequest:
    """Return a request for an adapter, or for the model itself if `name` is empty."""
    assert engine.adapters is not None
    return replace(each, model=name, adapter_id=engine.adapters.ids[name] if name else 0)


def draft_model(
    directory: Path,
    group: TensorParallelGroup | None = None,
    quantization: QuantizationMethod | None = None,
    vocabulary: DraftVocabulary | None = None,
    kernels: Kernels = "auto",
    clock: Callable[[], float] = time.monotonic,
    **changes: float,
) -> DraftModelProposer:
    """Make a proposer with the draft model in this process, with small limits."""
    vocabulary = vocabulary or DraftVocabulary()
    values = {"num_blocks": 200, "block_size": 4, "max_model_len": 160, "max_catch_up_tokens": 16}
    limits = DraftLimits(**{**values, **changes})  # type: ignore[arg-type]
    group = group or TensorParallelGroup()
    spec = RankModel(
        directory, "float32", limits, quantization, vocabulary=vocabulary.shared, kernels=kernels
    )
    runner = load_draft(spec, group)
    return DraftModelProposer(LocalDraftWorker(runner), limits, vocabulary.new_adapter(), clock)


def make_engine(
    directory: Path,
    config: EngineConfig,
    target: Target,
    proposer: Proposer | None = None,
    policy: SpeculationPolicy | None = None,
    recorder: StepRecorder | None = None,
    clock: Callable[[], float] = time.perf_counter,
    drafters: DrafterVersions | None = None,
) -> Engine:
    model, tokenizer = ModelConfig.from_directory(directory), tokenizer_of(directory)
    limits = config.adapters
    drafter = proposer if isinstance(proposer, DraftModelProposer) else None
    return Engine(
        config,
        model,
        target,
        tokenizer,
        proposer,
        policy,
        drafters=drafters,
        adapters=None if limits is None else Adapters(limits.max_loaded, drafter),
        recorder=recorder,
        clock=clock,
    )


def request(
    request_id: str, prompt: Sequence[int], *, seed: int = 0, **params: object
) -> EngineRequest:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    sampling = SamplingParams(**{**values, **params})  # type: ignore[arg-type]
    return EngineRequest(tuple(prompt), sampling, request_id=request_id, seed=seed)


class Transcript:
    """All outputs of an engine for one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: SpecdecError | None = None
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs] = []
        self.last: EngineOutput | None = None

    def add(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "an output after the end"
        assert self.error is None, "an output after an error"
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        assert len(output.text_lengths) == len(output.is_drafted) == len(output.token_ids)
        assert sum(output.text_lengths) == len(output.text)
        self.finish_reason, self.error = output.finish_reason, output.error
        self.logprobs.extend([] if output.logprobs is None else [output.logprobs])
        if output.prompt_logprobs is not None:
            self.prompt_logprobs.append(output.prompt_logprobs)
        self.last = output


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Transcript]:
    """Add all requests, step until they have ended, and check integrity after each step."""
    transcripts = {each.request_id: Transcript() for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            transcripts[output.request_id].add(output)
        engine.check_integrity()
    return transcripts


def tokens_by(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Return the tokens of each request, by its id, as `run` does."""
    return {name: each.token_ids for name, each in run(engine, requests).items()}


def _as_received(rows: list[VerifiedRow]) -> Sequence[VerifiedRow]:
    """Return results as they come from ranks: in the short form where rows are one token each."""
    if not all(row == VerifiedRow(row.seq_id, row.token_ids[:1]) and row.token_ids for row in rows):
        return tuple(rows)
    return SampledTokens(tuple(row.seq_id for row in rows), tuple(row.token_ids[0] for row in rows))


class HashTarget:
    """Target without a model: the next token is a hash of the tokens before it.

    It stores every sequence's tokens by KV slot, like a cache, so that it detects a wrong block
    table, a stale slot, or a row with a wrong start. Steps may be begun while another is in flight;
    they run in `collect`.

    steps: all that were begun. num_ahead: those of them that were begun after another.
    num_admitted_ahead: sequences that were admitted by these. num_held: rows that took a draft of
    the head that was held here.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int,
        head: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        max_num_seqs: float = math.inf,
    ) -> None:
        """head: makes a draft after a text, of at most N tokens, as on the ranks.

        max_num_seqs: most sequences that it has room for, as on a device.
        """
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self._head = head
        self.steps: list[StepInput] = []
        self.num_ahead = 0
        self.num_admitted_ahead = 0
        self.num_held = 0
        self._in_flight: deque[StepInput] = deque()
        self._slots: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        # By sequence: the last token's position, that token, and the head's draft after it.
        self._ends: dict[int, tuple[int, int, tuple[int, ...]]] = {}

    def begin(self, step: StepInput) -> None:
        if self._in_flight:
            self.num_ahead += 1
            self.num_admitted_ahead += len(step.admitted)
        self.steps.append(step)
        self._in_flight.append(step)

    def collect(self) -> VerifyOutput:
        step, verified = self._in_flight.popleft(), []
        self._update(step)
        rows = [self._resolved(row) for row in step.rows]
        self._run(rows)
        for row in rows:
            table = self._tables[row.seq_id]
            for offset, token in enumerate(row.token_ids):
                self._slots[self._slot(table, row.num_computed_tokens + offset)] = token
            if row.samples:
                written = [self._slots[self._slot(table, i)] for i in range(row.end)]
                tokens = self._verify(written[: row.known_end], row)
                for place, node in enumerate(row.accepted_drafts(tokens[:-1])):
                    target = self._slot(table, row.known_end + place)
                    self._slots[target] = self._slots[self._slot(table, row.known_end + node)]
                ahead = self._look_ahead(written, row) if row.num_lookahead_tokens else ()
                text = [*written[: row.known_end], *tokens]
                draft = self._draft(text, row) if tokens else ()
                self._ends[row.seq_id] = len(text) - 1, text[-1], draft
                verified.append(
                    VerifiedRow(
                        row.seq_id,
                        tokens,
                        has_bad_logits=not tokens,
                        lookahead_token_ids=ahead,
                        next_draft_token_ids=draft,
                    )
                )
        return VerifyOutput(step.step_id, _as_received(verified))

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the tokens that any engine with this target must generate."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def next_token(self, context: Sequence[int]) -> int:
        # Depends on the last three tokens, of five values: prompt lookup finds repetitions.
        digest = hashlib.sha256(repr(list(context[-3:])).encode()).digest()
        return digest[0] % 5 + 10

    def _update(self, step: StepInput) -> None:
        for seq_id in step.released:
            del self._tables[seq_id]
        for admission in step.admitted:
            assert admission.seq_id not in self._tables
            self._tables[admission.seq_id] = []
        assert len(self._tables) <= self.max_num_seqs, "more sequences than seats"
        for delta in step.block_table_deltas:
            self._tables[delta.seq_id][delta.start :] = delta.block_ids

    def _run(self, rows: Sequence[StepRow]) -> None:
        """Run the layers of a model that has some, before the rows are verified."""

    def _resolved(self, row: StepRow) -> StepRow:
        if not row.is_pending:
            return row
        resolved = row.resolved(*self._ends[row.seq_id])
        assert resolved.num_computed_tokens <= row.num_computed_tokens
        self.num_held += bool(row.drafting.num_held and resolved.num_draft_tokens)
        return resolved

    def _draft(self, text: list[int], row: StepRow) -> tuple[int, ...]:
        return tuple(self._head(text, row.drafting.num_next)) if self._head else ()

    def _verify(self, context: list[int], row: StepRow) -> tuple[int, ...]:
        new = [self.next_token(context)]
        while len(row.accepted_drafts(new)) == len(new):
            new.append(self.next_token([*context, *new]))
        return tuple(new)

    def _look_ahead(self, written: list[int], row: StepRow) -> tuple[int, ...]:
        ends = range(row.known_end + 1, row.end + 1)
        return tuple(self.next_token(written[:end]) for end in ends)

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


class ScriptedProposer:
    """Proposer with drafts from a test; `drafts` maps a sequence's tokens to a draft."""

    def __init__(self, drafts, *, base_shift: int = 0) -> None:  # type: ignore[no-untyped-def]
        self.drafts = drafts
        self.base_shift = base_shift
        self.num_calls = 0
        self.sent: list[list[SentRow]] = []
        self.released: list[int] = []

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.num_calls += 1
        return [
            Proposal(
                each.seq.seq_id,
                each.seq.num_tokens + self.base_shift,
                each.seq.token_ids[-1],
                tuple(self.drafts(each.seq.token_ids, each.max_tokens)),
            )
            for each in requests
        ]

    def ahead(self, rows: Sequence[SentRow]) -> None:
        self.sent.append(list(rows))

    def end_step(self, *, is_lost: bool = False) -> None:
        pass

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)
