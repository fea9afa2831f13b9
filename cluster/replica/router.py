"""The Router: what API servers need of a replica, in the process of its engine or another."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.model_name import DEFAULT_MODEL
from cluster.config.serve_config import ServeConfig
from cluster.observability.logs import current_request_id
from cluster.observability.request_context import current_caller
from cluster.replica.arrival import Arrival
from cluster.replica.auditor import Auditor
from cluster.replica.instrumentation import Instrumentation
from cluster.replica.orders import AbortOrder
from cluster.replica.preprocessor import Preprocessor
from cluster.replica.receipts import FutureModel, Receipts
from cluster.replica.sample_buffer import SampleBuffer
from specdec.config.engine import EngineConfig
from specdec.engine.metrics.metrics import CHAT, TEXT_COMPLETION, Metrics
from specdec.engine.receipts.report import default_tolerance
from specdec.engine.requests.engine_client import EngineClient
from specdec.engine.requests.preparations import Preparations
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.prediction import PredictedText
from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.matcher import Grammar
from specdec.types.deadline import Deadline
from specdec.types.errors import NotReadyError, TargetFailedError, UnknownModelError
from specdec.types.messages import BASE_MODEL
from specdec.types.reports.receipts import ReceiptModel
from specdec.types.request import (
    Caller,
    DetokenizeRequest,
    GenerateRequest,
    Prompt,
    TokenizeRequest,
)
from specdec.types.responses import EngineOutput, ModelInfo
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

if TYPE_CHECKING:  # front ends have no engine
    from specdec.engine.lifecycle import RunningEngine

_VERSION = version("specdec")

_SEED_BITS = 52
"""A number of JavaScript holds 53: its clients read the seed of an answer, and send it again."""

_NO_LIMIT = nullcontext()

_PROBE = EngineRequest(
    (0,),
    SamplingParams(max_tokens=1, temperature=0.0, speculation=SpeculationOptions(enabled=False)),
    request_id="health-generate",
    seed=0,
)


@dataclass(frozen=True)
class Generation:
    """A running request. The seed is known before the first token."""

    request_id: str
    seed: int
    outputs: AsyncGenerator[EngineOutput, None]


@dataclass(frozen=True)
class RoutedModel:
    """Description of the model that the engine of a Router runs.

    directory: of the tokenizer. replica: the name of the replica in the cluster.
    """

    config: ServeConfig
    engine: EngineConfig
    model: ModelConfig
    directory: Path
    replica: str


class Router(ABC):
    """Turns requests into those of an engine, and describes its models.

    A subclass knows the engine: in this process (`ReplicaRouter`), or in another one.
    """

    def __init__(
        self,
        routed: RoutedModel,
        metrics: Metrics,
        instrumentation: Instrumentation,
        samples: SampleBuffer,
    ) -> None:
        config = self.config = routed.config
        self.metrics = metrics
        self.max_model_len = routed.engine.max_model_len
        """Longest sequence, in tokens."""
        self.text = Preprocessor(routed.directory, routed.model, config.chat_template)
        self._model = routed.model
        self._instrumentation = instrumentation
        self._samples = samples
        self._preparations = Preparations()
        arithmetic = config.resolved_dtype, config.quantization, config.kv_cache_dtype
        tolerance = default_tolerance(*arithmetic)
        self.auditor = Auditor(self._client, metrics, tolerance)
        defaults = routed.model.sampling_defaults
        self._receipts = Receipts(config, defaults, metrics, self.auditor, self._describe_model)
        seed = config.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @abstractmethod
    def _client(self) -> EngineClient:
        """Return the client of the engine. Raises NotReadyError while the models load."""

    @abstractmethod
    def _describe_model(self) -> FutureModel:
        """Return the description of the model in receipts. Called by the constructor."""

    async def receipt_model(self) -> ReceiptModel:
        """Return that description, where there is a key; wait until it is known."""
        return await self._receipts.model()

    @abstractmethod
    def running_engine(self) -> RunningEngine:
        """Return the engine, in its own process only: front ends relay the calls that need it.

        Raises NotReadyError while the models load.
        """

    @property
    @abstractmethod
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""

    @property
    @abstractmethod
    def why_not_ready(self) -> str:
        """Empty while requests are admitted."""

    @property
    def is_ready(self) -> bool:
        """Return whether requests are admitted now."""
        return not self.why_not_ready

    @property
    @abstractmethod
    def adapter_ids(self) -> Mapping[str, int]:
        """Ids of the adapters that requests may use now, by name."""

    async def generate(
        self,
        call: GenerateRequest,
        *,
        arrival: Arrival | None = None,
        deadline: Deadline | None = None,
        on_admitted: Callable[[], None] | None = None,
    ) -> Generation:
        """Start a request. It and its outputs raise the engine's errors, and `deadline.error`.

        arrival: of the request; None for one that arrives now. on_admitted: called when the engine
        has accepted it, while the first output is awaited.
        """
        request_id = call.request_id or secrets.token_hex(8)
        current_request_id.set(request_id)
        if arrival is None:
            operation = CHAT if _is_chat(call.prompt) else TEXT_COMPLETION
            arrival = self.arrive((request_id,), call.model, operation, call.params.n)
        measured = arrival.measure(request_id, call.model, call.params)
        limited = deadline.enforce() if deadline and _takes_time(call) else _NO_LIMIT
        with arrival, limited:
            client = self._client_for(call.model)
            client.require_room(call.params.n)
            request = await self._prepare(request_id, call, may_expire=arrival.may_expire)
        measured.on_queued(call.params, request.seed)
        outputs = client.generate(request, measured, arrival, deadline, on_admitted=on_admitted)
        outputs = self._followed(call, request, outputs, deadline)
        return Generation(request_id, request.seed, outputs)

    async def probe(self) -> None:
        """Generate a token, or raise the engine's error. No metric counts it as a request."""
        deadline_s = time.monotonic() + self.config.queue_timeout_s
        outputs = self._client().generate(replace(_PROBE, queue_deadline_s=deadline_s))
        async with aclosing(outputs):
            async for _ in outputs:
                pass

    def arrive(
        self, request_ids: Sequence[str], model: str, operation: str, num_choices: int
    ) -> Arrival:
        """Return the context in which a request that arrives is prepared for `generate`.

        Its abort by any of `request_ids` ends it. operation, num_choices: see Arrival.
        """
        asked = request_ids, model, operation, num_choices
        return Arrival(*asked, self._preparations.open, self._instrumentation)

    def abort(self, order: AbortOrder) -> None:
        """End the requests that an order applies to; an unknown id is no error."""
        self._preparations.abort(order.applies_to)
        with suppress(NotReadyError):  # none runs
            self._client().abort_where(order.applies_to)

    def _followed(
        self,
        call: GenerateRequest,
        request: EngineRequest,
        outputs: AsyncGenerator[EngineOutput, None],
        deadline: Deadline | None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Return the outputs, observed by the sample buffer, the auditor and a receipt."""
        outputs = self._recorded(call, request, outputs)
        if (is_audited := self._receipts.draw_audit()) or request.receipt:
            return self._receipts.follow(request, outputs, deadline, is_audited=is_audited)
        return outputs

    def _recorded(
        self,
        call: GenerateRequest,
        request: EngineRequest,
        outputs: AsyncGenerator[EngineOutput, None],
    ) -> AsyncGenerator[EngineOutput, None]:
        """Return the outputs, recorded by the sample buffer if it accepts them."""
        is_recorded = self._samples.accepts(call.cache_salt, allow_training=call.allow_training)
        if not is_recorded or request.adapter_id != BASE_MODEL:
            return outputs
        temperature = call.params.resolved(self._model.sampling_defaults).temperature
        return self._samples.recording(request, temperature, outputs)

    async def _prepare(
        self, request_id: str, call: GenerateRequest, *, may_expire: bool
    ) -> EngineRequest:
        """Return an admitted request with token ids, compiled grammar and seed, if it may run."""
        params = call.params
        structure, prediction = params.structured_output, params.speculation.prediction
        request = EngineRequest.of(
            call,
            await self.text.encode(call.prompt),
            self.new_seed() if params.seed is None else params.seed,
            None if structure is None else await self._compile(params, current_caller.get()),
            adapter_id=self._adapter_of(call.model),
            request_id=request_id,
            prediction=None if prediction is None else await self._predicted_text(prediction),
            queue_deadline_s=time.monotonic() + self.config.queue_timeout_s if may_expire else inf,
        )
        if request.receipt:
            self._receipts.check(request)
        return request

    async def _compile(self, params: SamplingParams, caller: Caller) -> Grammar | None:
        """Return the compiled grammar of a request; see `Preprocessor.compile`."""
        return await self.text.compile(params.structured_output, caller, params.n)

    async def _predicted_text(self, text: str) -> PredictedText:
        """Return predicted output, without tokens that cannot fit the context."""
        token_ids = await self.text.encode(text, add_special_tokens=False)
        return await asyncio.to_thread(PredictedText, token_ids[: self.max_model_len])

    def new_seed(self) -> int:
        """Return the seed of a request without one; see `ServeConfig.seed`."""
        return self._seeds.getrandbits(_SEED_BITS)

    def check_admission(self, model: str, num_choices: int) -> None:
        """Check whether a request of `num_choices` would be admitted now.

        Raises UnknownModelError, NotReadyError, OverloadedError, and InvalidValueError for more
        choices than ever fit.
        """
        self._client_for(model).require_room(num_choices)

    def require_model(self, model: str) -> None:
        """Raise UnknownModelError for a model that another application may have."""
        self._adapter_of(model)

    def _client_for(self, model: str) -> EngineClient:
        """Return the client of the engine for a model. Raises UnknownModelError, NotReadyError."""
        self._adapter_of(model)
        return self._client()

    def max_tokens(self, params: SamplingParams) -> int:
        """Return the most tokens of a choice, after the shortest possible prompt."""
        default = self._model.sampling_defaults.max_tokens
        asked = default if params.max_tokens is None else params.max_tokens
        return self.max_model_len if asked is None else min(asked, self.max_model_len)

    async def tokenize(self, call: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or a chat."""
        self._adapter_of(call.model)
        add = call.add_special_tokens
        return list(await self.text.encode(call.prompt, add_special_tokens=add))

    async def detokenize(self, call: DetokenizeRequest) -> str:
        """Return the text of token ids without special tokens."""
        self._adapter_of(call.model)
        return await self.text.decode(call.token_ids)

    def model_info(self, model: str) -> ModelInfo:
        """Return the served model, or an adapter of it, and its main settings."""
        is_adapter = self._adapter_of(model) != BASE_MODEL
        speculation, name = self.config.speculative_config, self.config.served_model_name
        return ModelInfo(
            model=model if is_adapter else name,
            parent=name if is_adapter else "",
            architecture=self._model.architecture,
            dtype=self.config.resolved_dtype,
            vocab_size=self._model.vocab_size,
            max_model_len=self.max_model_len,
            tensor_parallel_size=self.config.tensor_parallel_size,
            speculation_method=speculation.method if speculation else None,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            version=_VERSION,
            sampling_defaults=self._model.sampling_defaults,
            speculation_methods=speculation.methods if speculation else (),
        )

    def model_infos(self) -> tuple[ModelInfo, ...]:
        """Return the served model, then its adapters by name."""
        return tuple(map(self.model_info, ("", *sorted(self.adapter_ids))))

    def _adapter_of(self, model: str) -> int:
        """Return the adapter that a request names; BASE_MODEL for the model itself.

        Raises UnknownModelError.
        """
        if model in ("", self.config.served_model_name):
            return BASE_MODEL
        adapter_id = self.adapter_ids.get(model, BASE_MODEL)
        if adapter_id == BASE_MODEL and model != DEFAULT_MODEL:
            raise UnknownModelError(model, self.config.served_model_name, *self.adapter_ids)
        return adapter_id


def _takes_time(call: GenerateRequest) -> bool:
    """Return whether a text has to be encoded or a grammar compiled, while others run."""
    params = call.params
    has_more = params.structured_output is not None or params.speculation.prediction is not None
    return has_more or isinstance(call.prompt, str) or _is_chat(call.prompt)


def _is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is neither a text nor token ids."""
    match prompt:
        case str() | (int(), *_):
            return False
        case _:
            return True
