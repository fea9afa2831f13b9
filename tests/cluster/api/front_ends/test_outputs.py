"""Outputs that go to another process are the same there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.front_ends.outputs import OutputEncoder, decodes_of, following, rows_of
from specdec.engine.requests.outputs import Delivery
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason


def output(unique_id, token_ids, **changes):
    fields = {"request_id": unique_id, "text": "", "finish_reason": None, "num_prompt_tokens": 5}
    fields |= {"num_output_tokens": len(token_ids), "speculation": SpeculationStats()}
    fields |= {"is_drafted": (False,) * len(token_ids), **changes}
    return EngineOutput(token_ids=tuple(token_ids), **fields)


STEPS = st.lists(  # tokens and the number of drafted ones, of two requests; none for a step without
    st.tuples(*[st.lists(st.integers(0, 2**31 - 1), max_size=5) for _ in "ab"], st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(STEPS, st.booleans())
def test_outputs_are_those_that_were_encoded(steps, ends):
    encoder, numbers = OutputEncoder(), {"a": 7, "b": 9}
    for unique_id, number in numbers.items():
        encoder.open(unique_id, number)
    lasts, stats = {}, SpeculationStats()
    totals = dict.fromkeys(numbers, 0)
    for index, (*tokens, num_drafted) in enumerate(steps):
        sent = []
        for unique_id, token_ids in zip(numbers, tokens, strict=True):
            if not token_ids:
                continue
            count = min(num_drafted, len(token_ids))
            stats = stats.after_draft(num_drafted, count)
            totals[unique_id] += len(token_ids)
            changes = {"num_output_tokens": totals[unique_id], "speculation": stats}
            changes["is_drafted"] = (True,) * count + (False,) * (len(token_ids) - count)
            if ends and index == len(steps) - 1:
                changes |= {"finish_reason": FinishReason.LENGTH, "is_last": True}
            sent.append(output(unique_id, token_ids, **changes))
        encoded = encoder.encode(Delivery(sent))
        came = {each[0]: EngineOutput._make(each) for each in encoded.whole}
        for row, token_ids in rows_of(encoded):
            [unique_id] = [name for name, number in numbers.items() if number == row.number]
            came[unique_id] = following(lasts[unique_id], row, token_ids)
        assert [came[each.request_id] for each in sent] == sent
        lasts |= came


def test_plain_decodes_are_a_number_and_a_token():
    encoder = OutputEncoder()
    for unique_id, number in (("a", 7), ("b", 2**31 - 1), ("c", 0)):
        encoder.open(unique_id, number)
    encoded = encoder.encode(Delivery([output("c", [1])], ["b", "a"], [3, 2**31 - 1]))
    assert [*decodes_of(encoded)] == [(2**31 - 1, 3), (7, 2**31 - 1)]
    assert len(encoded.decodes) == 16
    assert not [*rows_of(encoded)]
    assert len(encoded.whole) == 1
    later = output("c", [9], num_output_tokens=8)  # after six tokens of plain decodes
    [(row, token_ids)] = rows_of(encoder.encode(Delivery([later])))
    assert following(output("c", [1]), row, token_ids) == later


def test_what_numbers_do_not_contain_goes_whole():
    encoder = OutputEncoder()
    encoder.open("a", 1)
    encode = lambda *outputs: encoder.encode(Delivery(outputs)).whole  # noqa: E731
    assert len(encode(output("a", [1]))) == 1, "the first one has the prompt's counts"
    assert not encode(output("a", [2]))
    mixed = output("a", [3, 4], is_drafted=(False, True), num_steps=2)
    drafts = SpeculationStats(1, 1, 1)
    whole = [
        output("a", [2], text="x"),
        output("a", [2], finish_reason=FinishReason.STOP),
        output("a", [2], prediction=drafts),
        output("b", [2]),  # of several choices
        mixed,
    ]
    assert [EngineOutput._make(each) for each in encode(*whole)] == whole
    encoder.close("a")
    assert len(encode(output("a", [2]))) == 1
