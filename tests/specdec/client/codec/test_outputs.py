"""Outputs as messages and back: streams, completions, log-probabilities and the tokenizer's."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.replica.limits import check_detokenize, check_tokenize
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import Choice, ModelInfo, PositionLogprobs, TokenizedInput, TokenLogprob
from specdec.client.calls import detokenize_message, tokenize_message
from specdec.client.codec.inference import DETOKENIZE, MODEL_INFO, TOKENIZE, TOKENS
from specdec.client.codec.outputs import (
    decode_chunk,
    decode_completion,
    encode_chunk,
    encode_completion,
)
from specdec.types.errors import InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import DetokenizeRequest, TokenizeRequest
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import (
    SamplingDefaults,
)
from tests.cluster.api.grpc.test_codec import HELLO


def output(text, token_ids, finish_reason=None, **changes):
    values = {
        "request_id": "r1",
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason,
        "num_prompt_tokens": 7,
        "num_output_tokens": 3,
        "speculation": SpeculationStats(2, 6, 1),
        "is_last": finish_reason is not None,
    }
    return EngineOutput(**{**values, **changes})


def logprobs(*rows, ranks):
    """Return Logprobs. rows: the position's token, then the best ones; values follow the ids."""
    token_ids = np.array(rows, dtype=np.int32)
    return Logprobs(token_ids, -token_ids / np.float32(4), np.array(ranks, dtype=np.int32))


def spell(token_ids):
    return [f"t{token_id}" for token_id in token_ids]


USAGE = pb.Usage(
    prompt_tokens=7,
    completion_tokens=3,
    speculation=pb.SpeculationUsage(
        num_drafts=2,
        num_draft_tokens=6,
        num_accepted_tokens=1,
        verifier=pb.VERIFIER_COUPLED,
        is_lossless=True,
    ),
)


def test_a_stream_has_the_seed_at_both_ends_and_usage_at_the_last():
    outputs = [
        output("a", (1,)),
        output("é.", (2, 3), is_drafted=(True, False), text_lengths=(1, 1)),
        output("b", (), FinishReason.LENGTH),
    ]
    chunks = [
        encode_chunk("r1", 42, each, spell, is_first=index == 0)
        for index, each in enumerate(outputs)
    ]
    assert chunks == [
        pb.GenerateStreamResponse(request_id="r1", seed=42, text="a", token_ids=[1]),
        pb.GenerateStreamResponse(
            request_id="r1",
            text="é.",
            token_ids=[2, 3],
            is_drafted=[True, False],
            text_lengths=[1, 1],
        ),
        pb.GenerateStreamResponse(
            request_id="r1",
            seed=42,
            text="b",
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=USAGE,
        ),
    ]
    decoded = decode_chunk(chunks[1])
    assert (decoded.is_drafted, decoded.text_lengths) == ((True, False), (1, 1))


def test_a_seed_of_zero_is_sent():
    assert encode_chunk("r1", 0, output("a", (1,)), spell, is_first=True).HasField("seed")


def test_each_choice_of_a_stream_has_a_stop_reason_and_the_last_the_usage():
    stopped = output("a", (1,), FinishReason.STOP, is_last=False, stop_reason="END")
    last = output("b", (0,), FinishReason.STOP, choice=1, stop_reason=0, verifier="typical")
    chunks = [encode_chunk("r1", 42, each, spell, is_first=False) for each in (stopped, last)]
    assert [chunk.choice for chunk in chunks] == [0, 1]
    assert [chunk.WhichOneof("stop_reason") for chunk in chunks] == ["stop_string", "stop_token_id"]
    assert [chunk.HasField("usage") for chunk in chunks] == [False, True]
    assert not chunks[0].HasField("seed")
    assert chunks[1].usage.speculation.verifier == pb.VERIFIER_TYPICAL
    assert not chunks[1].usage.speculation.is_lossless
    first, second = map(decode_chunk, chunks)
    assert (first.stop_reason, first.finish_reason) == ("END", FinishReason.STOP)
    assert (second.stop_reason, second.usage.verifier) == (0, "typical")
    assert not second.usage.is_lossless


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_completion_joins_its_outputs(reason):
    response = encode_completion("r1", 42, [output("a", (1,)), output("b", (2, 3), reason)], spell)
    choice = pb.Choice(text="ab", token_ids=[1, 2, 3], finish_reason=f"FINISH_REASON_{reason.name}")
    assert response == pb.GenerateResponse(request_id="r1", seed=42, choices=[choice], usage=USAGE)
    assert decode_completion(response).finish_reason is reason


def test_a_completion_has_the_drafted_tokens_and_the_text_of_each():
    outputs = [
        output("a", (1,), is_drafted=(False,), text_lengths=(1,)),
        output("bcd", (2, 3), FinishReason.LENGTH, is_drafted=(True, False), text_lengths=(1, 2)),
    ]
    [choice] = decode_completion(encode_completion("r1", 42, outputs, spell)).choices
    assert (choice.is_drafted, choice.text_lengths) == ((False, True, False), (1, 1, 2))


def test_a_completion_has_its_choices_by_index():
    outputs = [
        output("a", (1,)),
        output("x", (4,), FinishReason.STOP, choice=1, is_last=False, stop_reason="s"),
        output("b", (2,)),
        output("c", (3,), FinishReason.LENGTH),
    ]
    decoded = decode_completion(encode_completion("r1", 42, outputs, spell))
    assert decoded.choices == (
        Choice(0, "abc", (1, 2, 3), FinishReason.LENGTH),
        Choice(1, "x", (4,), FinishReason.STOP, "s"),
    )
    assert (decoded.text, decoded.token_ids) == ("abc", (1, 2, 3))


def test_logprobs_arrive_as_they_were_sent():
    prompt = logprobs([7, 7, 3], [5, 3, 7], ranks=[1, 9])
    outputs = [
        output("a", (1,), logprobs=logprobs([1, 2, 1], ranks=[2]), prompt_logprobs=prompt),
        output("b", (2,), FinishReason.STOP, logprobs=logprobs([2, 2, 8], ranks=[1])),
    ]
    whole = decode_completion(encode_completion("r1", 42, outputs, spell))
    chunks = [decode_chunk(encode_chunk("r1", 42, each, spell, is_first=False)) for each in outputs]
    assert whole.logprobs == chunks[0].logprobs + chunks[1].logprobs
    assert whole.logprobs[0] == PositionLogprobs(
        TokenLogprob(1, "t1", -0.25),
        rank=2,
        best=(TokenLogprob(2, "t2", -0.5), TokenLogprob(1, "t1", -0.25)),
    )
    assert whole.prompt_logprobs == chunks[0].prompt_logprobs
    assert [each.rank for each in whole.prompt_logprobs] == [1, 9]
    assert chunks[1].prompt_logprobs is None


def test_given_tokens_follow_the_best_ones():
    given = replace(logprobs([1, 2, 9, 4], ranks=[2]), num_given=2)
    last = output("a", (1,), FinishReason.STOP, logprobs=given)
    [position] = decode_completion(encode_completion("r1", 42, [last], spell)).logprobs
    assert position.best == (TokenLogprob(2, "t2", -0.5),)
    assert position.given == (TokenLogprob(9, "t9", -2.25), TokenLogprob(4, "t4", -1.0))


def test_logprobs_of_the_drawn_tokens_alone():
    last = output("a", (1,), FinishReason.STOP, logprobs=logprobs([1], ranks=[4]))
    [position] = decode_completion(encode_completion("r1", 42, [last], spell)).logprobs
    assert position == PositionLogprobs(TokenLogprob(1, "t1", -0.25), rank=4, best=())


def test_a_prompt_of_one_token_has_empty_logprobs():
    nothing = Logprobs(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), np.zeros(0, int))
    last = output("a", (1,), FinishReason.STOP, prompt_logprobs=nothing)
    assert decode_completion(encode_completion("r1", 42, [last], spell)).prompt_logprobs == ()


def test_tokenize():
    request = tokenize_message(HELLO, "tiny", add_special_tokens=False)
    assert check_tokenize(TOKENIZE.decode(request)) == TokenizeRequest(tuple(HELLO), "tiny", False)
    assert check_tokenize(TOKENIZE.decode(pb.TokenizeRequest(text=""))) == TokenizeRequest(
        "", "", True
    )
    response = TOKENS.encode(TokenizedInput((1, 2), ("a", "b"), 64))
    expected = pb.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"], max_model_len=64)
    assert response == expected


def test_tokenize_needs_an_input():
    with pytest.raises(InvalidValueError, match=r"^input is None"):
        check_tokenize(TOKENIZE.decode(pb.TokenizeRequest()))


def test_detokenize():
    request = detokenize_message([1, 2], "tiny")
    assert request == pb.DetokenizeRequest(model="tiny", token_ids=[1, 2])
    assert check_detokenize(DETOKENIZE.decode(request)) == DetokenizeRequest((1, 2), "tiny")
    with pytest.raises(InvalidValueError, match="token_ids length is 1000001"):
        check_detokenize(DETOKENIZE.decode(pb.DetokenizeRequest(token_ids=[0] * 1_000_001)))


@pytest.mark.parametrize(("method", "count", "max_tokens"), [("ngram", 3, None), (None, 0, 99)])
def test_model_info_arrives_as_it_was_sent(method, count, max_tokens):
    info = ModelInfo(
        model="tiny",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=100,
        max_model_len=64,
        tensor_parallel_size=2,
        speculation_method=method,
        num_speculative_tokens=count,
        version="0.1.0",
        sampling_defaults=SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1, max_tokens),
        speculation_methods=() if method is None else ("suffix", method),
    )
    arrived = MODEL_INFO.decode(MODEL_INFO.encode(info))
    assert vars(arrived) == vars(info)
