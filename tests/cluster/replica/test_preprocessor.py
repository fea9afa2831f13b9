"""Tokens, texts and grammars of a replica whose models are not there."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from cluster.replica.encode_limiter import EncodingRoom
from cluster.replica.preprocessor import Preprocessor
from specdec.models.config import ModelConfig
from specdec.types.chat import ChatMessage, Conversation
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.sampling_params import StructuredOutput

TEXT = "Ask the baker for a café"
MARK = "<|endoftext|>"


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


@pytest.fixture
def text(tiny_model_dir, model):
    return Preprocessor(tiny_model_dir, model)


def test_nothing_is_read_before_it_is_asked_for(model):
    text = Preprocessor(Path("nowhere"), model)
    with pytest.raises(Exception, match="nowhere"):
        text.load()


async def test_a_text_there_and_back(text):
    token_ids = await text.encode(TEXT)
    assert await text.decode(token_ids) == TEXT
    assert b"".join(text.token_bytes.of(token_ids)).decode() == TEXT
    assert await text.encode(token_ids) == token_ids, "ids are used as they are"


async def test_a_chat_is_encoded_by_the_models_template(text):
    chat = (ChatMessage("user", TEXT),)
    token_ids = await text.encode(chat)
    assert token_ids == tuple(text.tokenizer.encode_chat(chat))
    assert TEXT in await text.decode(token_ids)


async def test_an_id_that_the_model_does_not_have_is_named(text, model):
    with pytest.raises(InvalidValueError, match=r"token_ids\[1\]"):
        await text.decode((0, model.vocab_size))


def test_special_tokens_are_told_from_text(text):
    assert text.is_special(MARK)
    assert not text.is_special("P")
    assert not text.is_special("no token at all")
    assert text.spell([0, 50]) == [MARK, "P"]


async def test_what_waits_to_be_encoded_and_decoded_is_bounded(text):
    chat, ids = (ChatMessage("user", TEXT),), (5,) * 20
    text._room = EncodingRoom(max_chars=2_000)
    async with asyncio.TaskGroup() as tasks:
        text.tokenizer  # noqa: B018 - reads it first
        waiting = tasks.create_task(text.encode("a" * 2_000))
        await asyncio.sleep(0)
        for call in (text.encode(TEXT), text.encode(chat), text.decode(ids)):
            with pytest.raises(OverloadedError, match="wait to be encoded"):
                await call
        assert await text.encode(ids) == ids, "ids are used as they are"
    assert len(waiting.result()) > 1
    assert await text.decode(await text.encode(TEXT)) == TEXT


HIDDEN = "\u0000\u200b\U000e0041" * 100
MESSAGE = {"role": "user", "content": HIDDEN}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 3, "enum": ["a"]}}}


@pytest.mark.parametrize(
    ("prompt", "num_chars"),
    [
        ((ChatMessage("user", HIDDEN), ChatMessage("user", "ab")), 4 + 300 + 4 + 2),
        (Conversation(messages=(MESSAGE, MESSAGE)), 2 * (4 + 4 + 7 + 300)),
        (
            Conversation(messages=(), tools=(TOOL,), template_kwargs={"a": "bc"}),
            sum(map(len, ("type", "function", "function", "name", "f", "parameters", "maximum")))
            + sum(map(len, ("3", "enum", "a", "a", "bc"))),
        ),
        (Conversation(messages=({"content": [{"text": "abc"}, None]},)), 7 + 4 + 3 + 1),
    ],
    ids=["messages", "conversation", "tools", "parts"],
)
async def test_a_chat_counts_by_its_characters_seen_or_not(text, monkeypatch, prompt, num_chars):
    counted = []

    async def run(work, number):
        counted.append(number)
        return ()

    monkeypatch.setattr(text._room, "run", run)
    await text.encode(prompt)
    assert counted == [num_chars]


async def test_a_grammar_is_compiled_where_one_is_asked_for(text):
    text.load()
    assert await text.compile(None) is None
    assert await text.compile(StructuredOutput(choice=("yes", "no"))) is not None


async def test_one_that_takes_too_long_is_refused_and_not_cancelled(text, monkeypatch):
    """Another request may wait for the same grammar."""
    unfinished = Future()
    text._grammars = type("Slow", (), {"submit": lambda self, spec: unfinished})()
    monkeypatch.setattr("cluster.replica.preprocessor.COMPILE_TIMEOUT_S", 0.01)
    with pytest.raises(OverloadedError):
        await text.compile(StructuredOutput(regex="a*"))
    unfinished.set_exception(InvalidValueError("regex", "a*", "shorter"))
    await asyncio.sleep(0)
    assert not unfinished.cancelled()
