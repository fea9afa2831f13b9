"""Makes a corpus: the target answers prompts at mixed temperatures, through the engine.

A run that was interrupted continues when it is started again: requests with a sample and those that
were dropped are both recorded. A later run with more answers to each prompt, or more self-written
prompts, extends the corpus.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from specdec.config.hardware import resolved_device
from specdec.llm import AsyncLLM, RequestOutput
from specdec.llm.concurrency import run_workers
from specdec.models.config.model_config import ModelConfig
from specdec.models.lora.peft import AdapterFiles
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import model_fingerprint
from specdec.text.tokenizer import Tokenizer
from specdec.training.data.corpus import CorpusInfo, CorpusWriter, Sample
from specdec.training.data.prompts import PromptRecord
from specdec.training.data.self_written import UsablePrompts, UserTurn
from specdec.types.adapters import LoRARequest
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage
from specdec.types.sampling.sampling_params import SEED_LIMIT, SamplingParams
from specdec.types.validation import require_range

_SAMPLES_PER_SHARD = 128
_MAX_AGE_S = 60.0  # of a finished sample that is not stored yet
_OPEN_PER_PLACE = 2
"""Conversations in progress per place in the batch, so that the engine's queue is never empty."""
_DEFAULTS_BY_DEVICE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cpu": {"dtype": "float32", "max_num_seqs": 64},
        "cuda": {"dtype": "bfloat16", "max_num_seqs": 256},
    }
)
_LEAST_STEP_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 256, "cuda": 8192})
"""Least limit of a step's tokens: on a GPU, prompts of many conversations begin in one step."""
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
"""A rate below 1 is per second too; tqdm would invert it."""
_LOG_INTERVAL_S = 30.0  # of the progress where stderr is not a terminal


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of a corpus that is generated.

    model: the target, as for `specdec.LLM`. adapter: directory of one with which it answers; empty
        for none. quantization, dtype, kernels: its precision. device:
        auto, cpu or cuda; once made, cpu or cuda.
    temperatures: each request draws one of them, by the seed.
    max_new_tokens: of an answer; longer ones are cut.
    answers_per_prompt: of the prompts file.
    num_self_written: prompts for the target to write and answer; some are dropped as unusable.
    prompt_prefixes: first words of self-written prompts; each draws one of them, by the seed. With
        none, the target writes whole prompts.
    dtype, max_num_seqs: None for float32 and 64 on a CPU, bfloat16 and 256 on a GPU; the second
        is the number of conversations in a batch.
    engine: further arguments of `specdec.LLM`.
    """

    model: str
    adapter: str = ""
    quantization: str = "none"
    dtype: str = None  # type: ignore[assignment] # here and below: `_DEFAULTS_BY_DEVICE`
    device: str = "cpu"
    kernels: str = "auto"
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0)
    max_new_tokens: int = 192
    answers_per_prompt: int = 1
    num_self_written: int = 0
    prompt_prefixes: tuple[str, ...] = ()
    max_num_seqs: int = None  # type: ignore[assignment]
    seed: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", resolved_device(self.device))
        for name, default in _DEFAULTS_BY_DEVICE[self.device].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if not self.temperatures:
            raise InvalidValueError("temperatures", self.temperatures, "at least one number")
        for temperature in self.temperatures:
            require_range("temperatures", temperature, 0, 100)
        require_range("max_new_tokens", self.max_new_tokens, 1, 2**20)
        require_range("answers_per_prompt", self.answers_per_prompt, 0, 1000)
        require_range("num_self_written", self.num_self_written, 0, 10**9)
        require_range("max_num_seqs", self.max_num_seqs, 1, 4096)

    def llm_arguments(self) -> dict[str, Any]:
        """Return the arguments of the engine. Nothing drafts: in a large batch that costs time."""
        lora: dict[str, Any] = {}
        if self.adapter:
            rank = AdapterFiles.read(Path(self.adapter)).rank
            lora = {"enable_lora": True, "max_lora_rank": rank}
        return {
            "model": self.model,
            "quantization": None if self.quantization == "none" else self.quantization,
            "dtype": self.dtype,
            "device": self.device,
            "kernels": self.kernels,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(_LEAST_STEP_TOKENS[self.device], 2 * self.max_num_seqs),
            "max_queue_len": _OPEN_PER_PLACE * self.max_num_seqs,
            "speculative_config": None,
            "stream_interval": self.max_new_tokens,
            **lora,
            **self.engine,
        }


@dataclass(frozen=True)
class GenerationRequest:
    """One conversation to generate.

    number: identifies it in the corpus; from -1 downwards for self-written prompts.
    turns: of the user; None for a prompt that the target writes after `prefix`.
    """

    number: int
    turns: tuple[str, ...] | None
    prefix: str
    temperature: float
    seed: int


def plan_requests(
    prompts: Sequence[PromptRecord], config: GenerationConfig
) -> list[GenerationRequest]:
    """Return all requests in a random order, so that the first ones represent them all.

    Number, temperature and seed of a request do not depend on how many others there are.
    """

    def request(number: int, turns: tuple[str, ...] | None) -> GenerationRequest:
        draw = random.Random(f"{config.seed} {number}")
        temperature, seed = draw.choice(config.temperatures), draw.randrange(SEED_LIMIT)
        is_steered = turns is None and config.prompt_prefixes
        prefix = draw.choice(config.prompt_prefixes) if is_steered else ""
        return GenerationRequest(number, turns, prefix, temperature, seed)

    num_answers = len(prompts) * config.answers_per_prompt
    requests = [request(n, prompts[n % len(prompts)].turns) for n in range(num_answers)]
    requests += [request(-1 - n, None) for n in range(config.num_self_written)]
    random.Random(config.seed).shuffle(requests)
    return requests


@dataclass
class Progress:
    """Counts of a run, with a bar on stderr, or a line now and then where that is a file.

    num_skipped: requests without a sample: too long, or a self-written prompt of no use.
    """

    num_requests: int
    clock: Callable[[], float] = time.monotonic
    num_samples: int = 0
    num_skipped: int = 0
    num_answer_tokens: int = 0
    _bar: Any = field(init=False)

    def __post_init__(self) -> None:
        interval = 0.1 if sys.stderr.isatty() else _LOG_INTERVAL_S
        self._began_at = self.clock()
        self._bar = tqdm(
            total=self.num_requests, desc="answers", unit=" requests",
            mininterval=interval, maxinterval=interval, dynamic_ncols=True,
            bar_format=_BAR_FORMAT,
        )  # fmt: skip

    def add(self, samples: Sequence[Sample]) -> None:
        """Count the samples of one request."""
        self.num_samples += len(samples)
        self.num_skipped += not samples
        self.num_answer_tokens += sum(len(each.answer) for each in samples)
        rate = self.num_answer_tokens / max(self.clock() - self._began_at, 1e-9)
        postfix = f"{self.num_answer_tokens} tokens, {rate:.0f} tokens/s"
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the last state of the bar."""
        self._bar.close()


class Conversations:
    """Conversations of scripted or self-written user turns with the target."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: GenerationConfig,
        tokenizer: Tokenizer,
        user_turn: UserTurn | None,
        usable: UsablePrompts,
    ) -> None:
        """user_turn: of the chat template; None where all prompts come from a file."""
        self._llm = llm
        self._lora = LoRARequest("adapter", 1, config.adapter) if config.adapter else None
        self._tokenizer = tokenizer
        self._max_new_tokens = config.max_new_tokens
        self._user_turn = user_turn
        self._usable = usable

    async def run(self, request: GenerationRequest) -> list[Sample]:
        """Return one sample for each answer; none where the first prompt cannot be answered."""
        turns = request.turns or await self._written_turns(request)
        messages: list[Mapping[str, str]] = []
        samples: list[Sample] = []
        for place, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=self._max_new_tokens,
                seed=(request.seed + place) % SEED_LIMIT,
            )
            try:
                output = await self._final(self._llm.chat, messages, params)
            except InvalidValueError:  # such as a conversation that exceeds the context length
                break
            answer = output.outputs[0]
            token_ids = (*output.prompt_token_ids, *answer.token_ids)
            samples.append(Sample(token_ids, len(output.prompt_token_ids), request.temperature))
            messages.append({"role": "assistant", "content": answer.text})
        return samples

    async def _written_turns(self, request: GenerationRequest) -> tuple[str, ...]:
        """Return the turn that the target writes, if it is usable."""
        assert self._user_turn is not None, "a self-written prompt without the user's turn"
        params = self._user_turn.sampling_params(request.seed)
        begin = self._user_turn.before(request.prefix, self._tokenizer)
        output = await self._final(self._llm.generate, begin, params)
        choice = output.outputs[0]
        text = request.prefix + choice.text
        usable = self._usable.accept(text, has_ended=choice.finish_reason == "stop")
        return () if usable is None else (usable,)

    async def _final(
        self, ask: Callable[..., AsyncGenerator[RequestOutput, None]], *arguments: Any
    ) -> RequestOutput:
        stream = ask(*arguments, output_kind="final_only", lora_request=self._lora)
        [output] = [each async for each in stream]
        return output


class ShardBuffer:
    """Collects samples, and requests without one, until they fill a shard or are a minute old."""

    def __init__(self, writer: CorpusWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._clock = clock
        self._flushed_at_s = clock()
        self._samples: list[Sample] = []
        self._requests: list[int] = []
        self._dropped: list[int] = []

    def add(self, samples: Sequence[Sample], request: int) -> None:
        """Take all samples of a request; they are stored together."""
        if not samples:
            self._dropped.append(request)
        self._samples.extend(samples)
        self._requests.extend([request] * len(samples))
        is_old = self._clock() - self._flushed_at_s >= _MAX_AGE_S
        if is_old or len(self._samples) >= _SAMPLES_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Store what there is."""
        self._writer.add(self._samples, self._requests, self._dropped)
        self._samples, self._requests, self._dropped = [], [], []
        self._flushed_at_s = self._clock()


async def run_requests(
    conversations: Conversations,
    requests: Iterator[GenerationRequest],
    num_workers: int,
    buffer: ShardBuffer,
    progress: Progress,
) -> None:
    """Run all requests, a limited number at once; store what finished even if it is interrupted."""

    async def work() -> None:
        for request in requests:
            samples = await conversations.run(request)
            buffer.add(samples, request.number)
            progress.add(samples)

    try:
        await run_workers(work, num_workers)
    finally:
        buffer.flush()


def generate_corpus(
    config: GenerationConfig, prompts: Sequence[PromptRecord], directory: Path
) -> Progress:
    """Generate the samples that `directory` lacks, and return the counts of this run.

    Raises InvalidValueError where the directory holds a corpus of other settings, and what loading
    the model raises.
    """
    requests = plan_requests(prompts, config)
    if not requests:
        raise InvalidValueError("prompts", "none", "given, or num_self_written above 0")
    model_directory = resolve(config.model)
    tokenizer = Tokenizer(model_directory)
    user_turn = UserTurn.of(tokenizer) if config.num_self_written else None
    info = corpus_info(config, prompts, model_directory, tokenizer)
    with CorpusWriter(directory, info) as writer:
        pending = [each for each in requests if each.number not in writer.requests]
        progress = Progress(len(pending))
        used = _used_texts(writer, user_turn, tokenizer) if user_turn else ()
        try:
            if pending:
                usable = UsablePrompts(used)
                _run(config, tokenizer, user_turn, usable, pending, writer, progress)
        finally:
            progress.close()
    return progress


def _used_texts(writer: CorpusWriter, user_turn: UserTurn, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the stored self-written prompts."""
    for prompt in writer.prompts(lambda request: request < 0):
        yield user_turn.text_of(prompt, tokenizer)


def _run(
    config: GenerationConfig,
    tokenizer: Tokenizer,
    user_turn: UserTurn | None,
    usable: UsablePrompts,
    pending: Sequence[GenerationRequest],
    writer: CorpusWriter,
    progress: Progress,
) -> None:
    with AsyncLLM(**config.llm_arguments()) as llm:
        require_range("max_new_tokens", config.max_new_tokens, 1, llm.max_model_len - 1)
        tokenizer.encode_chat([ChatMessage("user", "a")])  # raises without a chat template
        conversations = Conversations(llm, config, tokenizer, user_turn, usable)
        num_workers = min(len(pending), _OPEN_PER_PLACE * config.max_num_seqs)
        buffer = ShardBuffer(writer)
        asyncio.run(run_requests(conversations, iter(pending), num_workers, buffer, progress))


def corpus_info(
    config: GenerationConfig,
    prompts: Sequence[PromptRecord],
    model_directory: Path,
    tokenizer: Tokenizer,
) -> CorpusInfo:
    """Return what determines the samples of a corpus, apart from their number."""
    plan: dict[str, Any] = {
        "prompts_sha256": _digest([each.turns for each in prompts]),
        "temperatures": list(config.temperatures),
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
    if config.adapter:
        plan["adapter_sha256"] = AdapterFiles.read(Path(config.adapter)).fingerprint
    if config.prompt_prefixes:
        plan["prompt_prefixes_sha256"] = _digest(config.prompt_prefixes)
    return CorpusInfo(
        target=config.model,
        target_hash=model_fingerprint(model_directory),
        vocab_size=ModelConfig.from_directory(model_directory).vocab_size,
        chat_template=tokenizer.chat_template.plain_text,
        dtype=config.dtype,
        quantization=config.quantization,
        plan=plan,
    )


def _digest(texts: object) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
