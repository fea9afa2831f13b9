"""Events of an answer that grows are the JSON of the answer so far, and encode each token once."""

import json

import pytest

from cluster.api.sglang import encoded_answer
from cluster.api.sglang.encoded_answer import EncodedAnswer

PARTS = [
    ("Once", [5], [[-0.5, 5, "Once"]]),
    ("", [], []),
    (' "upon"\n', [6, 7], [[-1.5, 6, None], [None, 7, '"']]),
    ("東京 🌦 \\", [8], [[-2.0, 8, "東"]]),
]


@pytest.mark.parametrize("index", [None, 3])
def test_an_event_is_the_json_of_the_answer_so_far(index):
    encoded, text, ids, entries = EncodedAnswer(), "", [], []
    for number, (new_text, new_ids, new_entries) in enumerate(PARTS):
        text, ids, entries = text + new_text, ids + new_ids, entries + new_entries
        meta = {"id": "a", "completion_tokens": len(ids), "number": number}
        lists = {"output_token_logprobs": new_entries, "output_top_logprobs": [new_entries]}
        event = encoded.extended(new_text, new_ids, lists, meta, index)
        top = [each[2] for each in PARTS[: number + 1]]
        expected = {
            "text": text,
            "output_ids": ids,
            "meta_info": {**meta, "output_token_logprobs": entries, "output_top_logprobs": top},
            **({} if index is None else {"index": index}),
        }
        assert event == json.dumps(expected, ensure_ascii=False)
        assert (encoded.num_chars, encoded.num_ids) == (len(text), len(ids))


def test_an_answer_without_log_probabilities_has_no_lists():
    event = json.loads(EncodedAnswer().extended("a", [1], {}, {"id": "a"}, None))
    assert event == {"text": "a", "output_ids": [1], "meta_info": {"id": "a"}}


def test_each_token_is_encoded_once(monkeypatch):
    sizes = []
    encode = encoded_answer._encode
    monkeypatch.setattr(
        encoded_answer, "_encode", lambda value: sizes.append(len(value)) or encode(value)
    )
    encoded = EncodedAnswer()
    for number in range(1000):
        entries = {"output_token_logprobs": [[-0.5, number, None]]}
        event = encoded.extended("x", [number], entries, {"id": "a"}, None)
    assert len(json.loads(event)["output_ids"]) == 1000
    assert sum(sizes) == 4 * 1000, "text, id, log-probability and the fields of meta_info"
