"""Requests that continue: with tokens that they had before, and after the loss of the target."""

from dataclasses import replace

import pytest

from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineThread
from specdec.engine.metrics.metrics import (
    DECODE_TIME,
    GENERATION_TOKENS,
    MAX_GENERATION_TOKENS,
    TIME_PER_OUTPUT_TOKEN,
    Metrics,
)
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.requests.outputs import TargetLostError
from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, TargetFailedError
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SamplingDefaults
from tests.specdec.engine.test_engine import PROMPT, VOCAB_SIZE
from tests.specdec.engines import (
    HashTarget,
    Transcript,
    engine_config,
    make_engine,
    request,
    run,
)


@pytest.fixture
def target() -> HashTarget:
    return HashTarget(block_size=4, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("num_known", [1, 5, 23])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_resumed_request_generates_the_remaining_tokens(
    tiny_model_dir, target, num_known, num_draft_tokens
):
    whole = run(make_engine(tiny_model_dir, engine_config(0), target), [request("r", PROMPT)])["r"]
    known = tuple(whole.token_ids[:num_known])
    new_target = HashTarget(block_size=4, vocab_size=VOCAB_SIZE)
    engine = make_engine(tiny_model_dir, engine_config(num_draft_tokens), new_target)
    rest = run(engine, [replace(request("r", PROMPT), resume_token_ids=known)])["r"]
    assert [*known, *rest.token_ids] == whole.token_ids
    assert rest.last.num_output_tokens == 24
    # The text of the known tokens is not returned again.
    assert whole.text.endswith(rest.text)
    assert len(rest.text) < len(whole.text)


def test_as_many_tokens_as_the_model_generates_by_default_are_rejected(tiny_model_dir, target):
    config = engine_config(0)
    model = ModelConfig.from_directory(tiny_model_dir)
    model = replace(model, sampling_defaults=SamplingDefaults(max_tokens=8))
    engine = Engine(config, model, target, Tokenizer(tiny_model_dir))
    resumed = replace(request("r", PROMPT, max_tokens=None), resume_token_ids=(11,) * 8)
    with pytest.raises(InvalidValueError, match="it must be fewer than the 8"):
        engine.add(resumed)
    rest = run(engine, [replace(resumed, resume_token_ids=(11,) * 7)])["r"]
    assert len(rest.token_ids) == 1


async def test_measurements_are_of_generated_tokens(tiny_model_dir, target):
    thread = EngineThread(make_engine(tiny_model_dir, engine_config(0), target))
    metrics = Metrics()
    measured = RequestMetrics("r", metrics)
    resumed = replace(request("r", PROMPT, ignore_eos=True), resume_token_ids=(11,) * 20)
    outputs = [each async for each in thread.generate(resumed, measured)]
    await thread.close()
    assert sum(len(each.token_ids) for each in outputs) == 4
    assert outputs[-1].num_output_tokens == 24
    assert measured.latest.num_output_tokens == 4
    totals = {name: each.total for name, each in metrics.histograms.items()}
    assert totals[GENERATION_TOKENS] == totals[MAX_GENERATION_TOKENS] == 4
    assert totals[TIME_PER_OUTPUT_TOKEN] == pytest.approx(totals[DECODE_TIME] / 3)


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        ((11,) * 24, "resume_token_ids is '24 tokens'; it must be fewer than the 24"),
        ((11, 383), r"resume_token_ids\[1\] is 383"),
        ((2, 11), "resume_token_ids .* number 0 ends the text"),
    ],
)
def test_invalid_resume_token_ids_are_rejected(tiny_model_dir, target, resumed, message):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    with pytest.raises(InvalidValueError, match=message):
        engine.add(replace(request("r", PROMPT, ignore_eos=False), resume_token_ids=resumed))
    assert not engine.has_work


def test_replacing_the_target_loses_no_token(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    prompts = {f"r{i}": [10 + (i + j) % 5 for j in range(3 + 7 * i)] for i in range(6)}
    generated = {name: Transcript() for name in prompts}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    for _ in range(6):
        for output in engine.step():
            generated[output.request_id].add(output)
    engine.replace_target(HashTarget(block_size=4, vocab_size=VOCAB_SIZE))
    while engine.has_work:
        for output in engine.step():
            generated[output.request_id].add(output)
        engine.check_integrity()
    for name, prompt in prompts.items():
        assert generated[name].token_ids == target.continuation(prompt, 24)


class LostInBegin(HashTarget):
    """Is lost when its step number `num_begun` is sent, as where a rank does not read a message."""

    def __init__(self, num_begun: int) -> None:
        super().__init__(block_size=4, vocab_size=VOCAB_SIZE)
        self._num_left = num_begun

    def begin(self, step):
        if self._num_left == 0:
            raise TargetFailedError("rank 0 of the target does not read its messages")
        self._num_left -= 1
        super().begin(step)


@pytest.mark.parametrize("num_begun", range(6))
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_no_output_is_lost_with_a_target_that_fails_in_begin(
    tiny_model_dir, num_begun, num_draft_tokens, is_async
):
    """Sequences end in most steps, also in the one before the lost one."""
    lost = LostInBegin(num_begun)
    config = engine_config(num_draft_tokens, max_num_seqs=2, async_scheduling=is_async)
    engine = make_engine(tiny_model_dir, config, lost)
    lengths = range(1, 8)
    generated = {f"r{length}": Transcript() for length in lengths}
    for length in lengths:
        engine.add(request(f"r{length}", PROMPT, max_tokens=length))
    num_lost = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except TargetLostError as error:
            num_lost, outputs = num_lost + 1, error.outputs
            engine.replace_target(HashTarget(block_size=4, vocab_size=VOCAB_SIZE))
        for output in outputs:
            generated[output.request_id].add(output)
        engine.check_integrity()
    assert num_lost == 1
    for length in lengths:
        transcript = generated[f"r{length}"]
        assert transcript.token_ids == lost.continuation(PROMPT, length)
        assert transcript.finish_reason is FinishReason.LENGTH
