"""Stream intervals: when tokens of one choice and of several are sent; valid values."""

import itertools
from collections import defaultdict, deque
from dataclasses import replace

import pytest

from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, NoTokenLeftError
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    engine_config,
    local_engine,
    make_engine,
    request,
)

PROMPT = [11, 12, 13, 14, 11, 12]


@pytest.fixture
def target():
    return HashTarget(block_size=4, vocab_size=383)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize(("configured", "asked"), [(4, None), (1, 4), (9, 4), (4, 1), (1, None)])
def test_tokens_are_sent_in_the_requested_intervals(
    tiny_model_dir, target, configured, asked, num_draft_tokens
):
    config = engine_config(num_draft_tokens, stream_interval=configured)
    engine = make_engine(tiny_model_dir, config, target, ScriptedProposer(target.continuation))
    engine.add(replace(request("r", PROMPT), stream_interval=asked))
    sent = []
    num_steps = 0
    while engine.has_work:
        sent += engine.step()
        num_steps += engine.stats().last_batch_size
    interval = asked or configured
    assert [token for each in sent for token in each.token_ids] == target.continuation(PROMPT, 24)
    first, *others, last = [len(each.token_ids) for each in sent]
    assert first == 1
    assert all(interval <= count <= interval + num_draft_tokens for count in others)
    assert last <= interval + num_draft_tokens
    assert sent[-1].is_last
    assert not any(each.is_last for each in sent[:-1])
    assert sum(each.num_steps for each in sent) == num_steps
    everything = "".join(each.text for each in sent)
    assert everything == Tokenizer(tiny_model_dir).decode(target.continuation(PROMPT, 24))


def test_choices_that_begin_at_different_times_soon_send_together(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(stream_interval=4), target)
    sent = defaultdict(list)
    intervals = deque([None, None, None, 3])
    for step in itertools.count():
        if intervals:
            engine.add(replace(request(str(step), PROMPT), stream_interval=intervals.popleft()))
        for output in engine.step():
            sent[output.request_id].append((step, len(output.token_ids)))
        if not engine.has_work:
            break
    other = sent.pop("3")
    assert [size for _, size in other] == [1, *[3] * 7, 2]
    assert [[size for _, size in each[:2]] for each in sent.values()] == [[1, 4], [1, 3], [1, 2]]
    assert [[step for step, _ in each[1:6]] for each in sent.values()] == [[5, 9, 13, 17, 21]] * 3
    assert {size for each in sent.values() for _, size in each[2:-1]} == {4}


def test_buffered_tokens_survive_the_loss_of_the_target(tiny_model_dir, target):
    config = engine_config(stream_interval=50)
    engine = make_engine(tiny_model_dir, config, target)
    engine.add(request("r", PROMPT))
    sent = [output for _ in range(9) for output in engine.step()]
    engine.replace_target(HashTarget(block_size=4, vocab_size=383))
    while engine.has_work:
        sent += engine.step()
    assert [len(each.token_ids) for each in sent] == [1, 23]
    assert [t for each in sent for t in each.token_ids] == target.continuation(PROMPT, 24)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_buffered_tokens_are_sent_before_an_error(tiny_model_dir, num_choices):
    """In each choice no token is allowed after six times the same one."""
    sent = []
    for interval in (1, 8):
        engine = local_engine(tiny_model_dir, engine_config(0, stream_interval=interval))
        params = {"allowed_token_ids": (70, 2), "min_tokens": 20, "max_tokens": 30}
        made = request("r", PROMPT, bad_words=("dddddd",), n=num_choices, **params)
        engine.add(made)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert isinstance(outputs.pop().error, NoTokenLeftError)
        sent.append(
            [
                [token for each in outputs if each.choice == choice for token in each.token_ids]
                for choice in range(num_choices)
            ]
        )
    assert sent[0] == sent[1]
    assert len(sent[0][0]) > 4


@pytest.mark.parametrize("interval", [0, -1, 2**20 + 1])
def test_a_stream_interval_out_of_range_is_rejected(tiny_model_dir, target, interval):
    engine = make_engine(tiny_model_dir, engine_config(), target)
    with pytest.raises(InvalidValueError, match=r"stream_interval is .* from 1 to 1048576"):
        engine.add(replace(request("r", PROMPT), stream_interval=interval))
    with pytest.raises(InvalidValueError, match="stream_interval"):
        engine_config(stream_interval=interval)
    assert not engine.has_work
