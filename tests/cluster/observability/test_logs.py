"""Log lines: their content, their request id, and that each is written once."""

import asyncio
import json
import logging
import sys

import pytest

from cluster.observability.logs import (
    JsonFormatter,
    LogConfig,
    TextFormatter,
    configure,
    current_request_id,
)
from specdec.engine.metrics.metrics import Metrics
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.types.errors import OverloadedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams


@pytest.fixture
def clean_logging():
    """Restore the configuration that `configure` replaces."""
    names = ("", "cluster", "specdec", "uvicorn")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    yield
    for logger, level in before:
        logger.setLevel(level)
    logging.getLogger().handlers[:] = handlers


def record(message="hello", **fields):
    made = logging.makeLogRecord(
        {
            "name": "cluster.replica.router",
            "levelname": "INFO",
            "created": 0.25,
            "msecs": 250,
            "msg": message,
        }
    )
    vars(made).update({"process": 7, **fields})
    return made


def output(finish_reason=None):
    speculation = SpeculationStats(2, 6, 3)
    is_last = finish_reason is not None
    return EngineOutput(
        "r/0", (5,), "the answer", finish_reason, 12, 5, speculation, is_last=is_last
    )


def test_a_line_of_text():
    line = TextFormatter().format(record(request_id="r1", count=3))
    assert line == "1970-01-01T00:00:00.250Z INFO    cluster.replica.router (7) [r1] hello count=3"


def test_a_line_of_json():
    entry = json.loads(JsonFormatter().format(record('name "hé"', request_id="r1", count=3)))
    assert entry == {
        "ts": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "cluster.replica.router",
        "pid": 7,
        "message": 'name "hé"',
        "request_id": "r1",
        "count": 3,
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_message_cannot_begin_another_line(formatter):
    assert len(formatter.format(record("one\nERROR two\r\nthree")).splitlines()) == 1


def test_a_traceback_is_part_of_the_entry():
    try:
        raise ValueError("boom")
    except ValueError:
        failed = record(exc_info=sys.exc_info())
    assert TextFormatter().format(failed).splitlines()[-1] == "ValueError: boom"
    assert "ValueError: boom" in json.loads(JsonFormatter().format(failed))["traceback"]


async def test_the_request_id_is_that_of_the_task():
    async def line(request_id):
        current_request_id.set(request_id)
        await asyncio.sleep(0)
        return await asyncio.to_thread(TextFormatter().format, record())

    lines = await asyncio.gather(line("r1"), line("r2"))
    assert [each.split()[4] for each in lines] == ["[r1]", "[r2]"]
    assert "[" not in TextFormatter().format(record())


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_each_line_of_the_level_is_written_once(clean_logging, capsys, log_format):
    for _ in range(2):
        configure(LogConfig("info", log_format))
    for name in ("cluster.replica.router", "specdec.engine.engine", "another.library"):
        logging.getLogger(name).info("for information")
        logging.getLogger(name).debug("for debugging")
    logging.getLogger("another.library").warning("a warning")
    lines = capsys.readouterr().err.splitlines()
    assert ["for information" in line for line in lines] == [True, True, False]
    assert "a warning" in lines[-1]
    assert all((line[0] == "{") == (log_format == "json") for line in lines)


def test_the_handler_of_ray_serve_gets_the_format(clean_logging):
    serve, handler = logging.getLogger("ray.serve"), logging.StreamHandler()
    serve.addHandler(handler)
    try:
        configure(LogConfig(format="json"))
    finally:
        serve.removeHandler(handler)
    assert isinstance(handler.formatter, JsonFormatter)


def test_a_request_ends_in_one_line_of_numbers(caplog):
    caplog.set_level(logging.INFO, "specdec")
    observer = RequestMetrics("r1", Metrics(), clock=lambda: 10.0)
    observer.on_output(output(), 10.5)
    observer.on_output(output(FinishReason.STOP), 12.0)
    [ended] = caplog.records
    entry = json.loads(JsonFormatter().format(ended))
    expected = {
        "message": "request ended",
        "request_id": "r1",
        "finish_reason": "stop",
        "prompt_tokens": 12,
        "output_tokens": 5,
        "time_to_first_token_s": 0.5,
        "duration_s": 2.0,
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 3,
    }
    assert expected.items() <= entry.items()
    assert "the answer" not in str(entry)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(asyncio.CancelledError(), "abort"), (ValueError("a secret"), "ValueError")],
)
def test_an_aborted_request_ends_in_one_line(caplog, error, reason):
    caplog.set_level(logging.INFO, "specdec")
    RequestMetrics("r1", Metrics()).on_broken_off(error)
    [ended] = caplog.records
    line = TextFormatter().format(ended)
    assert f"[r1] request ended finish_reason={reason} duration_s=" in line
    assert "secret" not in line


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_refusal_is_logged_only_of_a_prepared_request(caplog, is_prepared):
    """Otherwise overload would log a line for each request that it refuses."""
    caplog.set_level(logging.INFO, "specdec")
    measured = RequestMetrics("r1", Metrics())
    if is_prepared:
        measured.on_queued(SamplingParams(), 1)
    measured.on_refused(OverloadedError("full"), 1)
    assert len(caplog.records) == is_prepared
