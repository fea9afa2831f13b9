"""Heads with KV make the same drafts, whatever happened to their sequences before.

The reference drafts after each token and verifies nothing, so it has a draft for every length. The
seeds are such that no two drafts tie: with torch the size of a batch changes the last bits.
"""

from functools import cache

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.cpu import native_library
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.worker import HeadFiles
from tests.specdec.engines import (
    ScriptedProposer,
    engine_config,
    local_engine,
    request,
    tokens_by,
)
from tests.specdec.heads import HEADS
from tests.specdec.trees import TreeProposer

K = 4
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
WITH_KV = ("eagle", "eagle3", "mtp", "p_eagle", "dflash", "dspark")
HEADS_AND_KERNELS = [
    pytest.param(
        method,
        kernels,
        marks=[] if (method, kernels) == ("eagle3", KERNELS[-1]) else pytest.mark.slow,
    )
    for method in WITH_KV
    for kernels in KERNELS
]
SHARED = [(31 * place) % 380 + 3 for place in range(26)]


def requests():
    prompts = [[*SHARED[: 26 - 4 * i], *(40 + i + place for place in range(5))] for i in range(4)]
    return [
        request(f"r{i}", prompt, seed=10 + i, temperature=0.8, max_tokens=40)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def tokens(tiny_model_dir):
    """Return the tokens without speculation, by request."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0)), requests())


@pytest.fixture(scope="module")
def head_dir_of(tiny_model_dir, tmp_path_factory, tokens):
    texts = [[*each.prompt, *tokens[each.request_id]] for each in requests()]
    return cache(
        lambda method: HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), texts)
    )


class Recording:
    """An engine, the drafts that its head made by request and length of its text, and the tokens.

    The tokens are those of the last run, by request.
    """

    def __init__(self, directory, head_dir, method, kernels, proposer=None, **changes):
        speculation = SpeculativeConfig.of(
            method, K, model=str(head_dir), **changes.pop("speculation", {})
        )
        policy = SpeculationPolicy(SpeculationControl("on", 32, K), clock=lambda: 0.0)
        config = engine_config(speculation=speculation, **changes)
        head = HeadFiles(head_dir, window=speculation.head.window, method=speculation.head.name)
        self.engine = local_engine(
            directory, config, proposer=proposer, policy=policy, head=head, kernels=kernels
        )
        self.drafts, self.tokens = {}, {}

    def run(self, asked, toggle=None):
        for each in asked:
            self.engine.add(each)
            self.tokens[each.request_id] = []
        num_steps = 0
        while self.engine.has_work:
            if toggle is not None:
                mode = "on" if toggle(num_steps) else "off"
                self.engine.set_speculation(SpeculationControl(mode, 32, K))
            for output in self.engine.step():
                self.tokens[output.request_id].extend(output.token_ids)
            self.engine.check_integrity()
            self.record()
            num_steps += 1
        return self

    def record(self):
        for seq in self.engine._scheduler._running:
            draft = seq.head_draft
            if draft is not None and draft.token_ids:
                self.drafts[seq.request.request_id, draft.base_length] = draft.token_ids

    @property
    def counts(self):
        return self.engine.stats().counts


@pytest.fixture(scope="module")
def expected_of(tiny_model_dir, head_dir_of):
    def drafts(method, kernels, **changes):
        nothing = ScriptedProposer(lambda tokens, count: ())
        made = Recording(
            tiny_model_dir,
            head_dir_of(method),
            method,
            kernels,
            nothing,
            max_num_seqs=1,
            enable_prefix_caching=False,
            **changes,
        )
        return made.run(requests()).drafts

    return drafts


def check(found, expected, least):
    """Compare drafts as far as both go: they are shorter near the end of a sequence."""
    assert len(found.keys() & expected.keys()) >= least
    for place in found.keys() & expected.keys():
        common = min(len(found[place]), len(expected[place]))
        assert found[place][:common] == expected[place][:common], place


@pytest.mark.parametrize(("method", "kernels"), HEADS_AND_KERNELS)
def test_drafts_are_those_of_an_undisturbed_run(
    tiny_model_dir, head_dir_of, expected_of, tokens, method, kernels
):
    expected = expected_of(method, kernels)
    assert len(expected) > 140
    assert len(set(expected.values())) > 40

    def recording(**changes):
        return Recording(tiny_model_dir, head_dir_of(method), method, kernels, **changes)

    def check_run(made, least):
        check(made.drafts, expected, least)
        assert made.tokens == tokens

    plain = recording(max_num_seqs=1)
    check_run(plain.run(requests()), 60)
    assert plain.counts.speculation.num_accepted_tokens > 0
    assert plain.counts.num_cached_tokens > 0, "the prompts have a common beginning"
    num_cached = plain.counts.num_cached_tokens
    plain.drafts = {}
    check_run(plain.run(requests()[::-1]), 60)
    assert plain.counts.num_cached_tokens > num_cached + 60, "whole prompts are cached now"

    chunked = recording(max_num_batched_tokens=9, max_num_seqs=3).run(requests())
    assert chunked.counts.num_prefill_chunks > 4
    check_run(chunked, 40)

    preempted = recording(num_blocks=40).run(requests())
    assert preempted.counts.num_preemptions > 0
    check_run(preempted, 40)

    toggled = recording(max_num_batched_tokens=12).run(requests(), lambda step: step // 6 % 2)
    check_run(toggled, 15)

    switched_on = recording(max_num_batched_tokens=8).run(requests(), lambda step: step > 16)
    check_run(switched_on, 10)
    assert min(length for _, length in switched_on.drafts) > 40, "a gap takes several steps"


@pytest.mark.parametrize(("method", "kernels"), HEADS_AND_KERNELS)
def test_a_window_changes_drafts_and_no_token(
    tiny_model_dir, head_dir_of, expected_of, tokens, method, kernels
):
    whole = expected_of(method, kernels)
    window = {"speculation": {"draft_window": 6}}
    cut = expected_of(method, kernels, **window)
    assert cut.keys() == whole.keys()
    assert cut != whole
    again = Recording(tiny_model_dir, head_dir_of(method), method, kernels, **window)
    check(again.run(requests()).drafts, cut, 40)
    assert again.tokens == tokens
    assert again.counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(("method", "kernels"), HEADS_AND_KERNELS)
def test_drafts_after_trees_are_those_of_an_undisturbed_run(
    tiny_model_dir, head_dir_of, expected_of, tokens, method, kernels
):
    """Features move with the KV of the accepted path, so a draft after it is the same."""
    answers = {
        each.prompt_token_ids: (*each.prompt_token_ids, *tokens[each.request_id])
        for each in requests()
    }
    trees = Recording(
        tiny_model_dir, head_dir_of(method), method, kernels, TreeProposer(answers, K)
    )
    check(trees.run(requests()).drafts, expected_of(method, kernels), 60)
    assert trees.counts.speculation.num_accepted_tokens > 30
    assert trees.tokens == tokens
