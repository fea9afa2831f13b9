# Modules: specdec.worker.device.head.lookup, specdec.worker.head.lookup, specdec.worker.head.texts
# Modules: specdec.worker.head.drafter
"""Prompt lookup in steps on the device: lossless, and the drafts of the engine's proposer."""

from dataclasses import replace
from itertools import product

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculation.target_lookup import with_lookup_on_ranks
from specdec.kernels.reference.ngram import NgramLengths
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker.warm_up import warm_up_target
from tests.specdec.engines import engine_config, local_engine, make_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import HEADS
from tests.specdec.lookups import proposed
from tests.specdec.worker.device.head.test_head import RecordedTarget
from tests.specdec.worker.device.recorded_graphs import RecordedGraphs
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps
from tests.specdec.worker.operators import assert_host_reads_nothing

FEW = (5, 6, 7)
"""The only tokens of repetitive requests."""
NGRAMS = NgramLengths(1, 3)


def requests(count=5, temperature=None, max_tokens=24, **params):
    """Return requests, of which all but the first repeat few tokens; some are greedy."""
    asked = []
    for index in range(count):
        own = 0.8 * (index % 2) if temperature is None else temperature
        few = FEW[: 2 + index % 2] if index else None
        prompt = [3 + (7 * index + 5 * place) % 11 for place in range(5 + 3 * index)]
        values = {"temperature": own, "max_tokens": max_tokens, "allowed_token_ids": few, **params}
        asked.append(request(f"r{index}", prompt, seed=index, **values))
    return asked


class RecordedTexts(RecordedTarget):
    """Also keeps the tokens with which sequences were admitted, by step."""

    def __init__(self, runner):
        super().__init__(runner)
        self.admitted = []

    def begin(self, step):
        self.admitted.append({each.seq_id: each.token_ids for each in step.admitted})
        super().begin(step)

    def drafted(self):
        """Yield the text of each row with new tokens, and the row."""
        texts = {}
        for admitted, output in zip(self.admitted, self.outputs, strict=True):
            texts |= {seq_id: [*tokens] for seq_id, tokens in admitted.items()}
            for row in output.rows:
                texts[row.seq_id] += row.token_ids
                yield texts[row.seq_id], row

    def assert_drafts_are_those_of_the_proposer(self):
        """Check every draft of every step, and return the number of those with tokens."""
        num_drafts = 0
        for text, row in self.drafted():
            draft = row.next_draft_token_ids
            assert list(draft) == proposed(text, NGRAMS, len(draft))
            assert row.next_draft_is_lookup == bool(draft)
            num_drafts += bool(draft)
        return num_drafts


def config_of(num_drafts=3, *, on_ranks=True, **changes):
    keys = {"prompt_lookup_min": NGRAMS.shortest, "prompt_lookup_max": NGRAMS.longest}
    speculation = SpeculativeConfig.of("ngram", num_drafts, **keys)
    changes = {"async_scheduling": True, **changes}
    return engine_config(
        speculation=with_lookup_on_ranks(speculation) if on_ranks else speculation, **changes
    )


def run_target(model_dir, asked, config, off=(), group=None, graphs=None, proposer=None, **options):
    """Run requests; return the tokens, the target and the engine. off: steps without drafts."""
    runner = device_runner(model_dir, config, graphs, group, **options)
    target, most = RecordedTexts(runner), config.speculation.num_speculative_tokens
    policy = SpeculationPolicy(SpeculationControl("on", 32, most), clock=lambda: 0.0)
    engine = make_engine(model_dir, config, target, proposer, policy)
    tokens = {each.request_id: [] for each in asked}
    for each in asked:
        engine.add(each)
    while engine.has_work:
        mode = "off" if len(target.outputs) in off else "on"
        if mode != engine.control.mode:  # a step after other settings is not begun ahead
            engine.set_speculation(SpeculationControl(mode, 32, most))
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return tokens, target, engine


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return a function that gives the tokens of requests without speculation."""
    engine = local_engine(tiny_model_dir, engine_config(0), kernels="torch")
    return lambda asked: tokens_by(engine, asked)


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


CASES = [(1, 0.8, 1), (1, 0.0, 8), (8, 0.8, 3)]
"""Sequences, temperature and draft tokens."""

MORE_CASES = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in product((1, 8), (0.0, 0.8), range(1, 9))
    if case not in CASES
]


@pytest.mark.parametrize(("count", "temperature", "num_drafts"), [*CASES, *MORE_CASES])
def test_the_drafts_are_those_of_the_engines_lookup(
    tiny_model_dir, expected, count, temperature, num_drafts
):
    """Nearly all steps begin ahead, of which few do after the engine's lookups."""
    asked = requests(1 + count, temperature)[1:]
    run = [tiny_model_dir, asked]
    tokens, _, engine = run_target(*run, config_of(num_drafts, on_ranks=False))
    assert tokens == expected(asked)
    by_engine = engine.stats().counts
    graphs = RecordedGraphs() if num_drafts == 3 else None
    found, target, engine = run_target(*run, config_of(num_drafts), graphs=graphs)
    assert found == tokens
    assert target.assert_drafts_are_those_of_the_proposer() > 3
    counts = engine.stats().counts
    if count == 1:  # others share the tokens of a step, by their numbers in the one before
        assert counts.speculation == by_engine.speculation
    assert counts.speculation.num_accepted_tokens > 0
    assert counts.num_steps - 3 <= counts.num_steps_ahead
    assert by_engine.num_steps_ahead < counts.num_steps_ahead / 2
    assert target.most_in_flight == 2


@pytest.mark.parametrize("has_graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_toggles_chunks_and_cached_blocks(tiny_model_dir, expected, on_device, has_graphs):
    """Every step yields what the host's operators yield, and runs on the device.

    While drafts are off, the texts on the device are not followed.
    """
    asked = requests()
    asked.append(replace(asked[4], request_id="again"))
    config = config_of(max_num_batched_tokens=20, max_num_seqs=3)
    off = (4, 5, 9)
    tokens, host, _ = run_target(tiny_model_dir, asked, config, off, runs_on_device=False)
    assert not on_device
    graphs = FakeGraphs() if has_graphs else None
    found, target, engine = run_target(tiny_model_dir, asked, config, off, graphs=graphs)
    assert found == tokens == expected(asked)
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert counts.num_cached_tokens > 0
    has_lookups = [any(row.drafting.num_lookup for row in rows) for rows in on_device]
    assert 10 < sum(has_lookups) < len(on_device)
    rows = [row for step in on_device for row in step]
    assert any(row.drafting.num_lookup and not row.samples for row in rows)


def test_preempted_sequences_continue_with_their_texts(tiny_model_dir, expected):
    asked = requests(max_tokens=40)
    found, target, engine = run_target(tiny_model_dir, asked, config_of(num_blocks=42))
    assert found == expected(asked)
    assert engine.stats().counts.num_preemptions > 0
    assert target.assert_drafts_are_those_of_the_proposer() > 10


def test_drafts_end_with_the_longest_sequence(tiny_model_dir, expected):
    """Sequences end at max_model_len, where a draft leaves room for a token of the target."""
    asked = requests(max_tokens=None)
    config = config_of(8, max_model_len=40)
    found, target, _ = run_target(tiny_model_dir, asked, config, graphs=FakeGraphs())
    assert {len(each.prompt) + len(found[each.request_id]) for each in asked} == {40}
    whole = expected([replace(each, params=replace(each.params, max_tokens=40)) for each in asked])
    assert all(whole[name][: len(tokens)] == tokens for name, tokens in found.items())
    assert target.assert_drafts_are_those_of_the_proposer() > 10


def test_grammars_and_rows_of_the_host(tiny_model_dir, expected, on_device):
    """A grammar's steps are not begun ahead; other verifiers are the host's, as their drafts."""
    asked = requests(5)
    structure = StructuredOutput(regex="[ab]{12,30}")
    grammar = grammar_compiler(tiny_model_dir).compile(structure)
    free = replace(asked[0].params, temperature=0.8, structured_output=structure)
    asked[0] = replace(asked[0], params=free, grammar=grammar)
    options = SpeculationOptions(verifier="rejection")
    asked[1] = replace(asked[1], params=replace(asked[1].params, speculation=options))
    asked[2] = replace(asked[2], params=replace(asked[2].params, prompt_logprobs=1))
    tokens, host, _ = run_target(tiny_model_dir, asked, config_of(), runs_on_device=False)
    found, target, _ = run_target(tiny_model_dir, asked, config_of(), graphs=FakeGraphs())
    assert found == tokens
    assert target.assert_drafts_are_those_of_the_proposer() > 10
    for name in ("r0", "r3", "r4"):
        assert found[name] == expected([each for each in asked if each.request_id == name])[name]
    assert 0 < len(on_device) < len(target.outputs)
    drafts = [[row.next_draft_token_ids for row in each.rows] for each in target.outputs]
    assert drafts == [[row.next_draft_token_ids for row in each.rows] for each in host.outputs]


def test_ranks_agree(tiny_model_dir, expected):
    asked = requests()

    def on_rank(group):
        tokens, target, _ = run_target(tiny_model_dir, asked, config_of(), group=group)
        return tokens, target.outputs

    found = run_ranks(2, on_rank)
    assert found[0] == found[1]
    assert found[0][0] == expected(asked)


def test_a_step_of_the_host_leaves_no_old_text(tiny_model_dir):
    """Its tokens are not on the device, which gets the text again with the next step."""
    runner = device_runner(tiny_model_dir, config_of(), FakeGraphs())
    warm_up_target(runner, 12, 160)  # runs both
    lookup = runner.device_steps._launcher.lookup
    assert lookup._followed == set()


def test_the_host_reads_nothing(tiny_model_dir):
    launcher = device_runner(tiny_model_dir, config_of(), FakeGraphs()).device_steps._launcher
    [shape] = {shape for _, shape in launcher._graphs._replays if shape[:2] == (2, 4)}
    assert_host_reads_nothing(lambda: launcher.lookup._draft(shape))


def cascade_config(method, directory, *, on_ranks=True, **changes):
    keys = {"prompt_lookup_min": NGRAMS.shortest, "prompt_lookup_max": NGRAMS.longest}
    first = {"method": "ngram", **keys}
    speculation = SpeculativeConfig.of(method, 3, model=str(directory), first=first)
    if on_ranks:
        speculation = with_lookup_on_ranks(speculation)
    return engine_config(speculation=speculation, **{"async_scheduling": True, **changes})


@pytest.mark.parametrize("method", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_lookups_come_before_a_head(tiny_model_dir, tmp_path, expected, on_device, method):
    """Each draft is that of the engine's cascade, and counts for its method; all steps go on."""
    asked = requests(6, max_tokens=40)
    tokens = expected(asked)
    texts = [[*each.prompt, *tokens[each.request_id]] for each in asked]
    head = HEADS[method](tiny_model_dir, tmp_path, texts)
    run, off = [tiny_model_dir, asked], (5, 6)
    config = cascade_config(method, head, max_num_batched_tokens=32)
    found, host, _ = run_target(*run, config, off, head=head, runs_on_device=False)
    assert found == tokens
    found, target, engine = run_target(*run, config, off, head=head, graphs=FakeGraphs())
    assert found == tokens
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    kinds = set()
    for text, row in target.drafted():
        if row.next_draft_token_ids:
            draft = proposed(text, NGRAMS, len(row.next_draft_token_ids))
            assert row.next_draft_is_lookup == bool(draft)
            assert not draft or [*row.next_draft_token_ids] == draft
            kinds.add(row.next_draft_is_lookup)
    assert kinds == {True, False}
    counts = engine.stats().counts
    assert counts.num_steps_ahead >= counts.num_steps - 8
    assert {*counts.drafted_by_method} == {"ngram", method}
    assert all(sum(each) for each in counts.accepted_by_method.values())


def test_a_cascade_counts_as_that_of_the_engine(tiny_model_dir, tmp_path, expected):
    [asked] = requests(2, max_tokens=40)[1:]
    texts = [[*asked.prompt, *expected([asked])["r1"]]]
    head, found = HEADS["medusa"](tiny_model_dir, tmp_path, texts), []
    for on_ranks in (False, True):
        config = cascade_config("medusa", head, on_ranks=on_ranks)
        tokens, _, engine = run_target(tiny_model_dir, [asked], config, head=head)
        counts = engine.stats().counts
        found.append((tokens, counts.drafted_by_method, counts.accepted_by_method))
    assert found[0] == found[1]


def test_a_request_may_name_one_method(tiny_model_dir, tmp_path, expected, on_device):
    asked = requests(5, max_tokens=40)[2:]
    tokens = expected(asked)
    texts = [[*each.prompt, *tokens[each.request_id]] for each in asked]
    head = HEADS["eagle3"](tiny_model_dir, tmp_path, texts)
    for index, name in ((0, "ngram"), (1, "eagle3")):
        params = replace(asked[index].params, speculation=SpeculationOptions(method=name))
        asked[index] = replace(asked[index], params=params)
    config = cascade_config("eagle3", head)
    found, host, _ = run_target(tiny_model_dir, asked, config, head=head, runs_on_device=False)
    assert found == tokens
    found, target, _ = run_target(tiny_model_dir, asked, config, head=head)
    assert found == tokens
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    kinds = {each: set() for each in range(3)}
    for _, row in target.drafted():
        if row.next_draft_token_ids:
            kinds[row.seq_id].add(row.next_draft_is_lookup)
    assert (kinds[0], kinds[1]) == ({True}, {False})
    assert kinds[2] >= {True}
    assert len(on_device) == len(target.outputs)
