"""The cursor of predicted output: it follows edits, and drafts nothing but the prediction."""

import random
import tracemalloc

import pytest

from specdec.sequences.prediction import MAX_DRAFT_TOKENS, PredictedText, PredictionCursor

PROMPT = [900, 901]


def steps_of(predicted, output, cursor=None):
    """Let a target verify the drafts for an output.

    Return the number of steps, the cursor, and the number of draft tokens and of accepted ones.
    """
    num_drafted = num_kept = 0
    cursor = cursor or PredictionCursor(PredictedText(predicted), len(PROMPT))
    text, num_steps = [*PROMPT, output[0]], 1  # the step of the prompt
    while len(text) - len(PROMPT) < len(output):
        done = len(text) - len(PROMPT)
        draft = cursor.draft(text)
        assert draft == cursor.draft(text), "asked twice"
        assert len(draft) <= MAX_DRAFT_TOKENS
        rest = output[done:]
        pairs = enumerate(zip(draft, rest, strict=False))
        alike = min(len(draft), len(rest))
        num_accepted = next((place for place, (ours, its) in pairs if ours != its), alike)
        text += rest[: num_accepted + 1]
        cursor.observe(len(draft), num_accepted)
        num_drafted, num_kept = num_drafted + len(draft), num_kept + num_accepted
        num_steps += 1
    return num_steps, cursor, num_drafted, num_kept


def test_an_unchanged_text_takes_few_steps():
    source = random.Random(1)
    predicted = [source.randrange(500) for _ in range(400)]
    num_steps, cursor, num_drafted, num_accepted = steps_of(predicted, predicted)
    assert num_steps <= 400 / (MAX_DRAFT_TOKENS + 1) + 4
    assert num_accepted == num_drafted
    assert cursor.draft([*PROMPT, *predicted]) == ()
    assert not cursor.has_place([*PROMPT, *predicted])


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: [*text[:50], 777, *text[51:]],
        lambda text: [*text[:50], 777, 778, 779, *text[50:]],
        lambda text: [*text[:50], *text[60:]],
        lambda text: [888, 889, *text],
        lambda text: [*text[:30], *text[80:], *text[30:80]],
    ],
    ids=["replaced", "inserted", "deleted", "opening", "moved"],
)
def test_an_edit_costs_a_few_steps(edit):
    predicted = list(range(100))
    unchanged, *_ = steps_of(predicted, predicted)
    edited, *_ = steps_of(predicted, edit(predicted))
    assert edited <= unchanged + 16


def test_a_replaced_token_is_skipped():
    cursor = PredictionCursor(PredictedText([1, 2, 3, 4, 5, 6]), 0)
    assert cursor.draft([1]) == (2, 3, 4, 5, 6)
    assert cursor.draft([1, 9]) == (3, 4, 5, 6)


def test_the_nearest_place_ahead_is_found():
    line = [10, 11]
    predicted = [*line, 1, 0, 0, *line, 2, 0, 0, *line, 3]
    cursor = PredictionCursor(PredictedText(predicted), 0)
    cursor.draft([10, 11, 1, 0, 0])
    assert cursor.draft([10, 11, 1, 0, 0, 98])  # one token is taken to be replaced
    assert cursor.draft([10, 11, 1, 0, 0, 98, 99]) == ()
    assert cursor.draft([10, 11, 1, 0, 0, 98, 99, 10, 11])[0] == 2


def test_a_text_without_any_likeness_has_no_draft_after_the_first_tokens():
    predicted = list(range(300))
    num_steps, _, num_drafted, num_accepted = steps_of(predicted, list(range(500, 700)))
    assert num_steps == 200
    assert num_drafted <= 16
    assert num_accepted == 0


def test_rejections_shorten_the_draft_and_accepted_ones_lengthen_it():
    cursor = PredictionCursor(PredictedText(range(100)), 0)
    assert len(cursor.draft([0])) == 8
    cursor.observe(8, 2)
    assert len(cursor.draft([0])) == 4
    for _ in range(9):
        cursor.observe(2, 0)
    assert len(cursor.draft([0])) == 2
    for length in (2, 4, 8, 16):
        cursor.observe(length, length)
    assert len(cursor.draft([0])) == MAX_DRAFT_TOKENS
    assert len(cursor.draft([0], 3)) == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_edits_keep_the_cursor_in_the_prediction(seed):
    source = random.Random(seed)
    predicted = [source.randrange(12) for _ in range(source.randrange(1, 200))]
    output = [source.randrange(14) if source.random() < 0.2 else each for each in predicted]
    for _ in range(source.randrange(4)):
        at = source.randrange(len(output))
        output[at : at + source.randrange(5)] = [source.randrange(14)] * source.randrange(5)
    if not output:
        return
    num_steps, _, num_drafted, num_accepted = steps_of(predicted, output)
    assert num_steps <= len(output)
    assert num_accepted <= num_drafted


def nearest_match(predicted, text, least, place):
    """Return what PredictedText.find does, by comparing every place."""
    for length in (8, 4, 3, 2):
        if length < least or length > len(text):
            continue
        ends = range(length, len(predicted))
        places = [end for end in ends if predicted[end - length : end] == text[-length:]]
        if places:
            return next((each for each in places if each >= place), places[-1])
    return None


@pytest.mark.parametrize("seed", range(10))
def test_the_index_finds_the_nearest_of_the_longest_matches(seed):
    source = random.Random(seed)
    predicted = [source.randrange(4) for _ in range(source.randrange(100))]
    indexed = PredictedText(predicted)
    for _ in range(60):
        start = source.randrange(len(predicted) + 1)
        text = [*predicted[start : start + 9], *[9] * source.randrange(2)][
            -source.randrange(1, 9) :
        ]
        least, place = source.choice((2, 4)), source.randrange(len(predicted) + 1)
        assert indexed.find(text, least, place) == nearest_match(predicted, text, least, place)


def test_a_lost_place_does_not_cost_a_pass_over_the_prediction():
    cursor = PredictionCursor(PredictedText(list(range(500)) * 400), 0)
    text = [600, 601, 602]
    cursor.draft(text)
    tracemalloc.start()
    try:
        for step in range(20):
            text += [step, step + 1, 700]
            cursor.draft(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20_000, "arrays as long as the prediction"
