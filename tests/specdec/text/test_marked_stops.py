from pathlib import Path

import pytest

from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.marked_stops import MarkedStops
from specdec.text.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.mark.parametrize(
    ("stop", "includes_stop", "taken", "stopped"),
    [
        ((END,), False, "the town", END),
        ((END,), True, "the town", END),
        (("n" + END,), True, "the town", "n" + END),
        (("n" + END,), False, "the tow", "n" + END),
        ((END + " x",), False, "the town", END + " x"),
        ((END + " y",), False, "the town x.", None),
        (("wn" + END + " x.",), False, "the to", "wn" + END + " x."),
        ((START + "the",), False, "", START + "the"),
        (("n x", END + " x"), False, "the town", END + " x"),
        ((START + END,), False, "the town x.", None),
        ((START + "the town" + END,), False, "", START + "the town" + END),
        ((START + "the town" + END + " x",), False, "", START + "the town" + END + " x"),
        ((" town" + END + " x.",), False, "the", " town" + END + " x."),
    ],
)
def test_stop_strings_may_name_special_tokens_outside_the_text(
    tokenizer: Tokenizer, stop: tuple[str, ...], includes_stop: bool, taken: str, stopped: str
) -> None:
    token_ids = tokenizer.encode(f"{START}the town{END}") + tokenizer.encode(" x.")
    detokenizer = IncrementalDetokenizer(tokenizer, stop, includes_stop=includes_stop)
    found, parts = None, []
    for token_id in token_ids:
        found = detokenizer.append(token_id)
        parts.append(detokenizer.take())
        if found is not None:
            break
    assert ("".join(parts) + detokenizer.flush(), found) == (taken, stopped)


def test_a_special_token_within_min_tokens_completes_no_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, (END,), min_tokens=1)
    assert [detokenizer.append(2) for _ in range(2)] == [None, END]


def test_strings_of_special_tokens_are_looked_up_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    MarkedStops.of(tokenizer, (END,))
    monkeypatch.setattr(tokenizer, "token_strings", None)
    assert MarkedStops.of(tokenizer, ("x", END)) is not None
    assert MarkedStops.of(tokenizer, ("x",)) is None
