"""Tokenization, grammars and the limit of concurrent encoding, without models."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from cluster.replica.preprocessor import EncodeLimiter, Preprocessor
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.request import OWN_PROCESS, Caller, ChatMessage, Conversation
from specdec.types.sampling.sampling_params import StructuredOutput

TEXT = "Ask the baker for a café"
MARK = "<|endoftext|>"


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


@pytest.fixture
def text(tiny_model_dir, model):
    return Preprocessor(tiny_model_dir, model)


def test_files_are_read_at_first_use(model):
    text = Preprocessor(Path("nowhere"), model)
    with pytest.raises(Exception, match="nowhere"):
        text.load()


async def test_a_text_is_encoded_and_decoded(text):
    token_ids = await text.encode(TEXT)
    assert await text.decode(token_ids) == TEXT
    assert b"".join(text.token_bytes.of(token_ids)).decode() == TEXT
    assert await text.encode(token_ids) == token_ids, "ids are used as they are"


async def test_a_chat_is_encoded_by_the_models_template(text):
    chat = (ChatMessage("user", TEXT),)
    token_ids = await text.encode(chat)
    assert token_ids == tuple(text.tokenizer.encode_chat(chat))
    assert TEXT in await text.decode(token_ids)


async def test_a_chat_is_encoded_with_the_beginning_of_its_answer(text):
    turns = ({"role": "user", "content": TEXT}, {"role": "assistant", "content": f"So{MARK} the"})
    chat = Conversation(turns, add_generation_prompt=False, continue_final_message=True)
    for marks, start in (([MARK], f"{MARK} the"), ([], f"So{MARK} the")):
        encoded = await text.encode_chat(chat, marks)
        assert encoded.token_ids == await text.encode(chat)
        assert encoded.answer_start == start


async def test_a_given_template_replaces_the_models(tiny_model_dir, model, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    text = Preprocessor(tiny_model_dir, model, path)
    token_ids = await text.encode((ChatMessage("user", TEXT),))
    assert await text.decode(token_ids) == f"<{TEXT}>"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidValueError, match=r"chat_template is .* a readable file in UTF-8"):
        Preprocessor(tiny_model_dir, model, path).load()


async def test_an_id_outside_the_vocabulary_is_refused(text, model):
    with pytest.raises(InvalidValueError, match=r"token_ids\[1\]"):
        await text.decode((0, model.vocab_size))


def test_special_tokens_are_distinguished_from_text(text):
    assert text.is_special(MARK)
    assert not text.is_special("P")
    assert not text.is_special("no token at all")
    assert text.spell([0, 50]) == [MARK, "P"]


async def test_the_queue_for_encoding_and_decoding_is_limited(text):
    chat, ids = (ChatMessage("user", TEXT),), (5,) * 20
    text._limiter = EncodeLimiter(max_chars=2_000)
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
async def test_a_chat_counts_all_its_characters(text, monkeypatch, prompt, num_chars):
    counted = []

    async def run(work, number):
        counted.append(number)
        return ()

    monkeypatch.setattr(text._limiter, "run", run)
    await text.encode(prompt)
    assert counted == [num_chars]


async def test_a_grammar_is_compiled_on_request_until_close(text):
    earlier = set(psutil.Process().children())
    text.close()
    text.load()
    assert await text.compile(None) is None
    assert await text.compile(StructuredOutput(choice=("yes", "no"))) is not None
    own = set(psutil.Process().children()) - earlier
    text.close()
    assert own
    assert not own & set(psutil.Process().children())


async def test_a_grammar_is_queued_for_its_caller(text):
    submitted = []

    def submit(self, spec, caller, num_sequences):
        submitted.append((spec, caller, num_sequences))
        compiled = Future()
        compiled.set_result(None)
        return compiled

    text._grammars = type("Queue", (), {"submit": submit})()
    spec = StructuredOutput(regex="a*")
    await text.compile(spec, Caller("ann"), 3)
    await text.compile(spec)
    assert submitted == [(spec, Caller("ann"), 3), (spec, OWN_PROCESS, 1)]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_that_has_ended_awaits_no_grammar(text, monkeypatch, leaves):
    """Its future is its own: another request may wait for the same grammar."""
    unfinished = Future()
    text._grammars = type("Slow", (), {"submit": lambda *_: unfinished})()
    monkeypatch.setattr("cluster.replica.preprocessor.COMPILE_TIMEOUT_S", 60 if leaves else 0.01)
    waiting = asyncio.create_task(text.compile(StructuredOutput(regex="a*")))
    await asyncio.sleep(0)
    if leaves:
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if leaves else OverloadedError):
        await waiting
    await asyncio.sleep(0)
    assert unfinished.cancelled()


SIZE = 5_000


class Work:
    """Work that counts concurrent runs, and ends when it may."""

    def __init__(self):
        self.num_running = 0
        self.may_end = asyncio.Event()

    async def __call__(self):
        self.num_running += 1
        await self.may_end.wait()
        self.num_running -= 1
        return 7


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_runs_or_waits_up_to_a_limit():
    limiter, work = EncodeLimiter(max_running=2, max_chars=3 * SIZE), Work()
    tasks = [asyncio.create_task(limiter.run(work, SIZE)) for _ in range(3)]
    await settle()
    assert (limiter.num_chars, work.num_running) == (3 * SIZE, 2)
    with pytest.raises(OverloadedError, match="15000 characters"):
        await limiter.run(work, 1)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7, 7, 7]
    await settle()
    assert limiter.num_chars == 0


async def test_small_prompts_have_a_minimum_size():
    limiter, work = EncodeLimiter(max_running=1, max_chars=100_000), Work()
    tasks = [asyncio.create_task(limiter.run(work, 0)) for _ in range(100)]
    await settle()
    with pytest.raises(OverloadedError):
        await limiter.run(work, 0)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7] * 100


async def test_without_other_work_any_size_is_accepted():
    limiter, work = EncodeLimiter(max_chars=SIZE), Work()
    work.may_end.set()
    assert await limiter.run(work, 2 * SIZE) == 7


async def test_cancelled_work_occupies_its_slot_until_it_is_done():
    limiter, work = EncodeLimiter(max_running=1), Work()
    started, waiting = (asyncio.create_task(limiter.run(work, SIZE)) for _ in range(2))
    await settle()
    started.cancel()
    waiting.cancel()
    await asyncio.gather(started, waiting, return_exceptions=True)
    assert (limiter.num_chars, work.num_running) == (SIZE, 1)
    work.may_end.set()
    await settle()
    assert limiter.num_chars == 0


async def test_an_error_is_raised_and_releases_the_slot():
    limiter = EncodeLimiter()

    async def fail():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await limiter.run(fail, SIZE)
    await settle()
    assert limiter.num_chars == 0
