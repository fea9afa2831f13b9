"""Answers of the try-it box: drafted tokens are marked, and errors are reported."""

import json

import pytest

from cluster.api.dashboard import try_it
from cluster.replica.router import Generation
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError, TargetFailedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason

TEXTS = ["the", " ri", "ver", ",", " the", " bridge", " and", " a", " caf", "", "é"]


class ScriptedRouter:
    """A router with given outputs that records whether its reader closed the stream early."""

    def __init__(self, outputs, error=None):
        self.outputs = outputs
        self.error = error
        self.was_closed = False

    async def generate(self, call, deadline):
        return Generation("r", 7, self._stream())

    async def _stream(self):
        try:
            for output in self.outputs:
                yield output
            if self.error is not None:
                raise self.error
        except GeneratorExit:
            self.was_closed = True
            raise


def outputs_of(token_ids, sizes, texts=None):
    """Make steps of the given sizes; the last token of each is sampled by the target."""
    outputs, accepted, drafted = [], 0, 0
    texts = texts or [""] * len(token_ids)
    for step, size in enumerate(sizes):
        start = sum(sizes[:step])
        accepted += size - 1
        drafted += 3
        is_last = step == len(sizes) - 1
        outputs.append(
            EngineOutput(
                request_id="r",
                token_ids=tuple(token_ids[start : start + size]),
                text="".join(texts[start : start + size]),
                text_lengths=tuple(map(len, texts[start : start + size])),
                finish_reason=FinishReason.LENGTH if is_last else None,
                num_prompt_tokens=5,
                num_output_tokens=start + size,
                speculation=SpeculationStats(step + 1, drafted, accepted),
                is_drafted=(True,) * (size - 1) + (False,),
                is_last=is_last,
            )
        )
    return outputs


def call():
    return try_it.decode_try_it({"prompt": "Hi", "max_tokens": 50})


def parsed(chunk):
    name, data = chunk.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_tokens_are_marked_as_drafted_and_join_to_the_text():
    token_ids, sizes = range(50, 50 + len(TEXTS)), [1, 3, 4, 1, 2]
    router = ScriptedRouter(outputs_of(token_ids, sizes, TEXTS))
    events = [
        parsed(chunk) async for chunk in await try_it.begin(router, call(), Deadline.after(60))
    ]
    assert [name for name, _ in events] == ["start", *["tokens"] * 5, "end"]
    assert events[0][1] == {"request_id": "r", "seed": 7}
    steps = [data["tokens"] for name, data in events if name == "tokens"]
    assert [[each["accepted"] for each in step] for step in steps] == [
        [True] * (size - 1) + [False] for size in sizes
    ]
    assert [each["text"] for step in steps for each in step] == TEXTS
    assert events[-2][1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": len(token_ids),
        "num_drafts": 5,
        "num_draft_tokens": 15,
        "num_accepted_tokens": len(token_ids) - 5,
    }
    assert events[-1][1] == {"finish_reason": "length", "verifier": "coupled", "is_lossless": True}


async def test_a_failed_answer_ends_with_an_error_for_clients():
    outputs = outputs_of([50, 51], [1, 1])[:1]
    router = ScriptedRouter(outputs, TargetFailedError("rank 1: secret"))
    events = [
        parsed(chunk) async for chunk in await try_it.begin(router, call(), Deadline.after(60))
    ]
    assert [name for name, _ in events] == ["start", "tokens", "error"]
    assert "secret" not in events[-1][1]["message"]


async def test_closing_the_stream_ends_the_request():
    router = ScriptedRouter(outputs_of([50] * 9, [1] * 9))
    events = await try_it.begin(router, call(), Deadline.after(60))
    assert parsed(await anext(events))[0] == "start"
    await events.aclose()
    assert router.was_closed


async def test_engine_errors_are_raised_before_the_first_event():
    router = ScriptedRouter([], InvalidValueError("max_tokens", 50, "at most 9"))
    with pytest.raises(InvalidValueError, match="max_tokens"):
        await try_it.begin(router, call(), Deadline.after(60))


def test_speculation_options_are_passed_on():
    body = {"prompt": "Hi", "max_tokens": 5, "temperature": 0.5, "seed": 3, "as_chat": False}
    options = {"enabled": True, "num_speculative_tokens": 2}
    read = try_it.decode_try_it({**body, "speculation": options})
    assert (read.prompt, read.params.temperature, read.params.seed) == ("Hi", 0.5, 3)
    assert read.params.speculation.enabled is True
    assert read.params.speculation.num_speculative_tokens == 2
    assert call().prompt[0].role == "user"
    assert call().stream_interval == 1, "steps would be merged"
