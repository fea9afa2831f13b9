"""Receipts of front ends, with the description of the model that their Router has made."""

import asyncio
import gc
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest

from cluster.replica import receipts
from cluster.replica.receipts import Receipts
from specdec.engine.receipts.signatures import SigningKey
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.reports.receipts import Statement
from specdec.types.request import GenerateRequest
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.api.front_ends.linked import LinkedFrontEnd
from tests.cluster.replica_on_hash_target import PROMPT

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=1)


@pytest.fixture
def router(replica, tmp_path):
    """Return a Router whose front ends have a key; it has none itself yet."""
    SigningKey.generate().write(path := tmp_path / "key.pem")
    config = replace(replica.router.config, receipt_key_file=path)
    replica.router.routed = replace(replica.router.routed, config=config)
    return replica.router


async def answered(front_end):
    request = GenerateRequest(PROMPT, PARAMS, receipt=True)
    generation = await front_end.router.generate(request)
    return [output async for output in generation.outputs]


async def test_the_weights_are_read_once_for_all(router, monkeypatch):
    num_readings, describe = 0, receipts.receipt_model

    def count(*arguments):
        nonlocal num_readings
        num_readings += 1
        return describe(*arguments)

    monkeypatch.setattr(receipts, "receipt_model", count)
    config, defaults = router.routed.config, router._model.sampling_defaults
    router._receipts = Receipts(
        config, defaults, router.metrics, router.auditor, router._describe_model
    )
    for _ in range(2):
        front_end = await LinkedFrontEnd.start(router)
        *_, last = await answered(front_end)
        statement = Statement.from_text(last.receipt.statement)
        assert statement.model == await router.receipt_model()
        front_end.close()
    assert num_readings == 1


async def test_the_reason_for_no_receipts_is_that_of_the_router(router, monkeypatch):
    async def fail():
        raise UnsupportedModelError("no weights in it")

    monkeypatch.setattr(router, "receipt_model", fail)
    front_end = await LinkedFrontEnd.start(router)
    await asyncio.wait([front_end.router._receipts._model])
    with pytest.raises(InvalidValueError, match="false for this model: no weights in it"):
        await answered(front_end)
    front_end.close()


async def test_a_reason_that_no_request_reads_is_not_logged(router, monkeypatch, caplog):
    """The Router has logged it."""
    monkeypatch.setattr(router, "receipt_model", AsyncMock(side_effect=UnsupportedModelError("")))
    front_end = await LinkedFrontEnd.start(router)
    await asyncio.wait([front_end.router._receipts._model])
    front_end.close()
    del front_end.router._receipts._model
    gc.collect()
    assert "never retrieved" not in caplog.text
