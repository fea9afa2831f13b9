from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.sampling.token_history import TokenHistory

tokens = st.lists(st.integers(0, 6), max_size=8)  # few, so that they repeat


class Growth(RuleBasedStateMachine):
    """A history compared with a plain list."""

    @initialize(prompt=st.lists(st.integers(0, 6), min_size=1, max_size=8), output=tokens)
    def admit(self, prompt, output):
        self.prompt, self.output = prompt, list(output)
        self.history = TokenHistory([*prompt, *output], len(prompt))

    @rule(more=tokens)
    def extend(self, more):
        self.history.extend(more)
        self.output.extend(more)

    @rule(data=st.data())
    def truncate(self, data):
        length = data.draw(st.integers(0, len(self.output)))
        self.history.truncate(len(self.prompt) + length)
        del self.output[length:]

    @rule(data=st.data(), new=tokens, is_end=st.booleans())
    def follow(self, data, new, is_end):
        start = data.draw(st.integers(0, len(self.output)))
        before = self.output[start:]
        self.history.follow(len(self.prompt) + start, new, is_end=is_end)
        stays = not is_end and before[: len(new)] == new
        self.output[start:] = before if stays else new

    @rule(data=st.data())
    def follow_a_chunk_of_the_prompt(self, data):
        start = data.draw(st.integers(0, len(self.prompt)))
        end = data.draw(st.integers(start, len(self.prompt)))
        self.history.follow(start, self.prompt[start:end], is_end=False)

    @invariant()
    def equals_one_made_afresh(self):
        everything = self.prompt + self.output
        assert list(self.history.token_ids) == everything
        counts = self.history.counts()
        assert counts.token_ids.tolist() == list(dict.fromkeys(everything))
        in_output = Counter(self.output)
        assert counts.num_in_output.tolist() == [in_output[t] for t in counts.token_ids.tolist()]


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@given(tokens, tokens)
def test_ends_with_ignores_the_prompt(prompt, output):
    history = TokenHistory([9, *prompt, *output], 1 + len(prompt))
    for count in range(len(output) + 1):
        assert history.ends_with(output[len(output) - count :])
    assert not history.ends_with([9, *prompt, *output])
    assert not history.ends_with([*output, 8])


def test_counts_are_a_copy():
    history = TokenHistory([1, 2], 1)
    before = history.counts()
    history.extend([2, 3])
    history.truncate(1)
    history.append(5)
    assert before.token_ids.tolist() == [1, 2]
    assert before.num_in_output.tolist() == [0, 1]


def test_missing_tokens_are_rejected():
    with pytest.raises(AssertionError):
        TokenHistory([1, 2], 3)
    with pytest.raises(AssertionError):
        TokenHistory([1, 2], 1).follow(3, [4], is_end=True)
