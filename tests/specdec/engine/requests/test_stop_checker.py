# Modules: specdec.engine.requests.stop_checker, specdec.engine.requests.engine_client
"""Ends of sequences on a target without a model, with drafts and without."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.engine.requests.engine_client import OutputDetokenizer
from specdec.engine.requests.stop_checker import append, extend
from specdec.sequences.sequence import Sequence
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import DetokenizeError, InvalidValueError
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import HashTarget, engine_config, make_engine, request, run

PROMPT = [11, 12, 13, 14, 11, 12]
EOS = 2


class EndsAt(HashTarget):
    """Yields `token_id` once the context is `length` tokens long."""

    def __init__(self, length, token_id):
        super().__init__(block_size=4, vocab_size=383)
        self.length = length
        self.token_id = token_id

    def next_token(self, context):
        return self.token_id if len(context) == self.length else super().next_token(context)


@pytest.fixture(params=[0, 7], ids=["no drafts", "drafts"])
def ask(request, tiny_model_dir):
    """Return a function that runs one request and returns its transcript and the tokenizer."""

    def ask(target=None, **params):
        config = engine_config(request.param)
        engine = make_engine(tiny_model_dir, config, target or HashTarget(4, vocab_size=383))
        return run(engine, [request_of(params)])["r"], Tokenizer(tiny_model_dir)

    return ask


def request_of(params):
    return request("r", PROMPT, **params)


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_token_ends_the_text_and_is_included_on_request(ask, includes):
    target = EndsAt(10, 50)
    generated, tokenizer = ask(target, stop_token_ids=(50,), include_stop_str_in_output=includes)
    expected = [*target.continuation(PROMPT, 4), 50]
    assert generated.token_ids == expected
    assert generated.text == tokenizer.decode(expected if includes else expected[:-1])
    assert (generated.finish_reason, generated.last.stop_reason) == (FinishReason.STOP, 50)


@pytest.mark.parametrize("includes", [False, True])
def test_an_eos_token_has_no_stop_reason_and_is_included_on_request(ask, includes):
    params = {"include_stop_str_in_output": includes, "skip_special_tokens": False}
    generated, tokenizer = ask(EndsAt(10, EOS), ignore_eos=False, **params)
    kept = generated.token_ids if includes else generated.token_ids[:-1]
    assert generated.token_ids[-1] == EOS
    assert generated.text == tokenizer.decode(kept, skip_special_tokens=False)
    assert (generated.finish_reason, generated.last.stop_reason) == (FinishReason.STOP, None)


def test_an_ignored_eos_token_may_be_a_stop_token(ask):
    generated, _ = ask(EndsAt(10, EOS), ignore_eos=True, stop_token_ids=(EOS,))
    assert (len(generated.token_ids), generated.last.stop_reason) == (5, EOS)


def test_special_tokens_are_kept_on_request(ask):
    generated, tokenizer = ask(EndsAt(10, EOS), skip_special_tokens=False)
    assert "<|im_end|>" in generated.text
    assert generated.text == tokenizer.decode(generated.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_is_the_stop_reason_and_is_included_on_request(ask, includes):
    whole, tokenizer = ask()
    stop = tokenizer.decode(whole.token_ids[4:7])
    generated, _ = ask(stop=("never", stop), include_stop_str_in_output=includes)
    end = whole.text.index(stop) + len(stop) * includes
    assert generated.text == whole.text[:end]
    assert (generated.finish_reason, generated.last.stop_reason) == (FinishReason.STOP, stop)


def test_stop_strings_are_ignored_before_min_tokens(ask):
    whole, tokenizer = ask()
    stop = tokenizer.decode(whole.token_ids[:1])
    again = next(i for i in range(6, 24) if stop in tokenizer.decode(whole.token_ids[6 : i + 1]))
    generated, _ = ask(stop=(stop,), min_tokens=6)
    assert len(ask(stop=(stop,))[0].token_ids) == 1
    assert generated.token_ids == whole.token_ids[: again + 1]
    assert generated.text == tokenizer.decode(whole.token_ids[:again])


def test_a_length_limit_has_no_stop_reason(ask):
    generated, _ = ask(max_tokens=3)
    assert (generated.finish_reason, generated.last.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("resumed", [(), (20, 21)], ids=["new", "resumed"])
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 7, "n": 3},
        {"ignore_eos": False},
        {"ignore_eos": False, "include_stop_str_in_output": True, "skip_special_tokens": False},
        {"stop_token_ids": (EOS,), "n": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_drafts", [0, 7])
def test_outputs_without_text_are_the_same_but_for_it_which_a_reader_makes(
    tiny_model_dir, num_drafts, params, resumed, interval
):
    params = params | ({"n": 1} if resumed else {})
    asked = replace(request_of(params), resume_token_ids=resumed, stream_interval=interval)
    with_text, without = (
        _outputs(tiny_model_dir, num_drafts, replace(asked, detokenize=detokenize))
        for detokenize in (True, False)
    )
    assert any(each.text for each in with_text)
    assert without == [each._replace(text="", text_lengths=()) for each in with_text]
    text = OutputDetokenizer(asked, Tokenizer(tiny_model_dir))
    assert [text.complete(each) for each in without] == with_text


def test_stop_strings_need_the_text(tiny_model_dir):
    asked = request_of({"stop": ("never found",)})
    assert _outputs(tiny_model_dir, 0, asked)
    with pytest.raises(InvalidValueError, match="detokenize is False; it must be true where stop"):
        _outputs(tiny_model_dir, 0, replace(asked, detokenize=False))


def test_a_text_that_cannot_be_resumed_ends_at_the_token_of_the_error(tiny_model_dir, monkeypatch):
    append, asked = IncrementalDetokenizer.append, request_of({"stop": ("never found",)})

    def fail(self, token_id):
        if token_id == 21:
            raise ValueError("broken")
        return append(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)
    with pytest.raises(DetokenizeError, match="after 1 output tokens"):
        _outputs(tiny_model_dir, 0, replace(asked, resume_token_ids=(20, 21, 22)))
    monkeypatch.setattr(IncrementalDetokenizer, "append", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _outputs(tiny_model_dir, 0, asked)


def _outputs(directory, num_drafts, asked):
    engine = make_engine(directory, engine_config(num_drafts), EndsAt(14, EOS))
    engine.add(asked)
    steps = iter(lambda: engine.step() if engine.has_work else None, None)
    return [output for outputs in steps for output in outputs]


@pytest.mark.parametrize("max_model_len", [9, 10, 11, 64])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 3},
        {"max_tokens": 4},
        {"stop_token_ids": (50,)},
        {"stop": ("never found",)},
        {"ignore_eos": False},
        {"skip_special_tokens": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("token_ids", [(20, 21, 22), (20, 50, 22), (20, EOS, 22)], ids=str)
def test_tokens_are_added_together_only_if_none_ends_the_sequence(
    tiny_model_dir, token_ids, params, max_model_len
):
    """Then the sequence is that of one by one."""
    tokenizer = Tokenizer(tiny_model_dir)
    one_by_one, together = (_sequence(tokenizer, params, max_model_len) for _ in range(2))
    is_extended = extend(together, token_ids, {EOS})
    stops = []
    for token in token_ids:
        stops.append(append(one_by_one, token, {EOS}, max_model_len))
        if stops[-1]:
            break
    if not is_extended:
        assert together.token_ids == PROMPT
        assert any(stops) or params.keys() & {"stop", "stop_token_ids"} or EOS in token_ids
        return
    assert stops == [None] * 3
    assert together.token_ids == one_by_one.token_ids


def _sequence(tokenizer, params, max_model_len):
    made = request_of(params)
    detokenizer = IncrementalDetokenizer.of(tokenizer, made.params, PROMPT)
    seq = Sequence(0, made, SamplingRules(seed=0), detokenizer, made.params.max_tokens)
    seq.open_length = seq.longest_open(max_model_len)
    return seq
