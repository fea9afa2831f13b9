"""Tokenization, grammars and the limit of concurrent encoding, without models."""

import asyncio
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from cluster.observability.logs import current_request_id
from cluster.replica.preprocessor import EncodeLimiter, Preprocessor
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.request import OWN_PROCESS, Caller, ChatMessage, Conversation
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.waiting import DEADLINE_S, eventually

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
        self.num_running = self.num_started = 0
        self.may_end = threading.Event()
        self._lock = threading.Lock()

    def __call__(self):
        self.num_started += 1
        self._count(1)
        assert self.may_end.wait(DEADLINE_S)
        self._count(-1)
        return 7

    def _count(self, number):
        with self._lock:
            self.num_running += number


async def test_work_runs_or_waits_up_to_a_limit():
    limiter, work = EncodeLimiter(max_running=2, max_chars=3 * SIZE), Work()
    tasks = [asyncio.create_task(limiter.run(work, SIZE)) for _ in range(3)]
    await eventually(lambda: (limiter.num_chars, work.num_running) == (3 * SIZE, 2))
    with pytest.raises(OverloadedError, match="15000 characters"):
        await limiter.run(work, 1)
    assert work.num_running == 2
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7, 7, 7]
    assert limiter.num_chars == 0


async def test_small_prompts_have_a_minimum_size():
    limiter, work = EncodeLimiter(max_running=1, max_chars=100_000), Work()
    tasks = [asyncio.create_task(limiter.run(work, 0)) for _ in range(100)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await limiter.run(work, 0)
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [7] * 100


async def test_without_other_work_any_size_is_accepted():
    limiter, work = EncodeLimiter(max_chars=SIZE), Work()
    work.may_end.set()
    assert await limiter.run(work, 2 * SIZE) == 7


@pytest.mark.parametrize("size", [1_000, SIZE])
async def test_two_works_run_together_if_both_are_small(size):
    """Their results come together, so that a small prompt does not wait for a large one."""
    limiter, first, second, third = EncodeLimiter(max_running=1), Work(), Work(), Work()
    first.may_end.set()
    sizes = {first: 0, second: size, third: 0}
    tasks = [asyncio.create_task(limiter.run(*each)) for each in sizes.items()]
    await eventually(lambda: second.num_running)
    if size == SIZE:
        await asyncio.wait_for(tasks[0], DEADLINE_S)
    else:
        assert not tasks[0].done()
    third.may_end.set()
    assert not third.num_started
    second.may_end.set()
    assert await asyncio.gather(*tasks) == [7, 7, 7]


async def test_the_other_of_two_works_ends_where_one_was_cancelled():
    limiter, first = EncodeLimiter(max_running=1), Work()
    tasks = [asyncio.create_task(limiter.run(work, 0)) for work in (first, lambda: 8)]
    await eventually(lambda: first.num_running)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    first.may_end.set()
    assert await tasks[1] == 8
    assert limiter.num_chars == 0


async def test_cancelled_work_occupies_its_slot_until_it_is_done():
    limiter, work, other = EncodeLimiter(max_running=1), Work(), Work()
    started = asyncio.create_task(limiter.run(work, SIZE))
    await eventually(lambda: work.num_running)
    waiting, prompt = asyncio.create_task(limiter.run(other, SIZE)), weakref.ref(other)
    await asyncio.sleep(0)
    del other
    started.cancel()
    waiting.cancel()
    await asyncio.wait((started, waiting))
    assert (limiter.num_chars, work.num_running) == (SIZE, 1)
    del waiting
    assert prompt() is None, "the queue has kept the prompt"
    work.may_end.set()
    await eventually(lambda: limiter.num_chars == 0)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("broken"), ValueError("broken")),
        (BaseException("panic"), RuntimeError("BaseException: panic")),
        (StopIteration(), RuntimeError("StopIteration: ")),
    ],
    ids=repr,
)
async def test_an_error_is_raised_and_releases_the_slot(error, raised):
    """It has no effect on another prompt, which the same thread encodes."""
    limiter = EncodeLimiter(max_running=1)

    def fail():
        raise error

    calls = limiter.run(fail, 0), limiter.run(lambda: 7, 0)
    async with asyncio.timeout(DEADLINE_S):
        found, other = await asyncio.gather(*calls, return_exceptions=True)
    assert (repr(found), other) == (repr(raised), 7)
    assert limiter.num_chars == 0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
async def test_without_a_thread_an_error_is_raised(monkeypatch, error):
    limiter, ran = EncodeLimiter(max_running=1), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=error))
        calls = (limiter.run(lambda: ran.append(1), 0) for _ in range(2))
        assert await asyncio.gather(*calls, return_exceptions=True) == [error, error]
    assert limiter.num_chars == 0
    await limiter.run(lambda: ran.append(2), SIZE)
    assert ran == [2]


async def test_work_has_the_context_of_its_caller():
    current_request_id.set("r1")
    assert await EncodeLimiter().run(current_request_id.get, SIZE) == "r1"
