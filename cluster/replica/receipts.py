"""Receipts and audits of the answers of a Router."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from cluster.replica.auditor import Auditor
from specdec.engine.metrics.metrics import Metrics
from specdec.engine.receipts.issuing import Answer, issue, require_base_model, require_seeded
from specdec.engine.receipts.model import receipt_model
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError, SpecdecError
from specdec.types.reports.receipts import Receipt, ReceiptModel
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingDefaults

if TYPE_CHECKING:
    from specdec.engine.receipts.signatures import SigningKey

logger = logging.getLogger(__name__)


FutureModel = Future[ReceiptModel] | asyncio.Future[ReceiptModel]


class Receipts:
    """Issues the receipts that requests ask for, and passes a share of all answers to an auditor.

    For one event loop.
    """

    def __init__(
        self,
        config: ServeConfig,
        defaults: SamplingDefaults,
        metrics: Metrics,
        auditor: Auditor,
        describe: Callable[[], FutureModel],
    ) -> None:
        """describe: called where there is a key. Raises InvalidValueError for a file without one.

        defaults: of the model.
        """
        self._config, self._defaults = config, defaults
        self._metrics, self._auditor = metrics, auditor
        self._random = random.Random()
        self._key: SigningKey | None = None
        if config.receipt_key_file is not None:
            from specdec.engine.receipts.signatures import SigningKey  # imports cryptography

            self._key = SigningKey.read(config.receipt_key_file)
            self._model = describe()

    async def model(self) -> ReceiptModel:
        """Return the description of the model, where there is a key; wait until it is known."""
        # A request that waits for it does not cancel it.
        return await asyncio.shield(asyncio.wrap_future(self._model))

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValueError for a request whose answer cannot have a receipt."""
        if self._key is None:
            raise InvalidValueError("receipt", True, "false: the service has no receipt_key_file")
        if self._model.done() and (fault := self._model.exception()) is not None:
            reason = fault if isinstance(fault, SpecdecError) else "its files cannot be read"
            raise InvalidValueError("receipt", True, f"false for this model: {reason}")
        self._require_seeded(request)

    def draw_audit(self) -> bool:
        """Draw whether the next answer is audited, if it can be."""
        share = self._config.audit_share
        return bool(share) and self._random.random() < share

    async def follow(
        self,
        request: EngineRequest,
        outputs: AsyncGenerator[EngineOutput, None],
        deadline: Deadline | None,
        *,
        is_audited: bool,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of a request, recorded for its receipt or an audit.

        Raises the error of the deadline, which also limits the time until the weights are read.
        """
        is_audited = is_audited and self._can_audit(request)
        answer = Answer(request)
        async with aclosing(outputs) as stream:
            async for output in stream:
                answer.add(output)
                if output.is_last and is_audited:
                    for part in answer.sampled_parts:
                        self._auditor.add(part)
                if output.is_last and request.receipt:
                    with deadline.enforce() if deadline else nullcontext():
                        receipt = await self._issue(answer)
                    yield output._replace(receipt=receipt)
                else:
                    yield output

    async def _issue(self, answer: Answer) -> Receipt:
        assert self._key is not None, "the request was checked"
        model = await self.model()
        # On a thread: hashing long outputs would delay the other streams.
        receipt = await asyncio.to_thread(
            issue, answer, self._key, model, self._defaults, int(time.time())
        )
        self._metrics.num_receipts += 1
        return receipt

    def _can_audit(self, request: EngineRequest) -> bool:
        """Return whether an audit is possible: masks of grammars would cost the engine time."""
        if request.grammar is not None:
            return False
        try:
            self._require_seeded(request)
        except InvalidValueError:
            return False
        return request.params.structured_output is None

    def _require_seeded(self, request: EngineRequest) -> None:
        require_base_model(request.adapter_id)
        service = self._config.speculative_config
        default = service.verifier if service is not None else "coupled"
        params = request.params
        temperature = params.resolved(self._defaults).temperature
        require_seeded(params, temperature, params.speculation.verifier or default)


def read_model(
    config: ServeConfig, directory: Path, model: ModelConfig, max_model_len: int
) -> Future[ReceiptModel]:
    """Return the description of a model; start to read all weights for it, on a thread."""
    future = Future[ReceiptModel]()
    describe = partial(receipt_model, config, directory, model, max_model_len)
    # A daemon, unlike those of an executor: reading the weights delays no exit.
    Thread(target=_settle, args=(future, describe), daemon=True).start()
    return future


def _settle(future: Future[ReceiptModel], describe: Callable[[], ReceiptModel]) -> None:
    """Set the result of a future, or the error, which is logged."""
    try:
        future.set_result(describe())
    except Exception as error:
        logger.exception("no receipts: the files of the model cannot be read")
        future.set_exception(error)
