"""Steps on the device with trees of heads, drafted there or after them by the host."""

from dataclasses import replace
from functools import cache

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_tree import depths
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.state import DeviceStepLimits
from specdec.worker.head.runner import HeadRunner
from tests.combinations import every_value
from tests.specdec.attention_heads import fitted_head_dir
from tests.specdec.engines import engine_config, local_engine, make_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS, medusa_dir_with_nan
from tests.specdec.worker.device.head.test_head import (
    NUM_DRAFTS,
    RecordedTarget,
    num_with_drafts,
    requests,
    shaped,
)
from tests.specdec.worker.device.recorded_graphs import graphs_of
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps
from tests.specdec.worker.operators import Operators

NUM_NODES = 8
SWITCHES = range(4, 16)
"""Steps whose drafts are chains."""


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), requests())


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory, expected):
    """Return a function that gives the directory of a head, some of whose drafts are right."""
    asked = requests()
    texts = [[*each.prompt, *expected[each.request_id]] for each in asked]
    lengths = [len(each.prompt) for each in asked]

    @cache
    def write(method):
        directory = tmp_path_factory.mktemp(method.replace(" ", "_"))
        if method == "medusa with NaN":
            return medusa_dir_with_nan(tiny_model_dir, directory, texts)
        if method in ("medusa", "hydra", "colocated_draft_model"):
            return HEADS[method](tiny_model_dir, directory, texts)
        return fitted_head_dir(method, tiny_model_dir, directory, texts, lengths, depth=NUM_DRAFTS)

    return write


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


@pytest.fixture
def tree_counts(monkeypatch):
    """Return a list with the number of trees that a head drafts after each step, by the host."""
    counts, draft = [], HeadRunner.draft_next

    def counted(self, rows, states, verified):
        found = draft(self, rows, states, verified)
        counts.append(sum(row.next_draft_parents is not None for row in found))
        return found

    monkeypatch.setattr(HeadRunner, "draft_next", counted)
    return counts


def config_of(method, directory, **changes):
    speculation = SpeculativeConfig.of(
        method, NUM_DRAFTS, model=str(directory), num_draft_tree_tokens=NUM_NODES
    )
    return engine_config(speculation=speculation, async_scheduling=True, **changes)


def run_trees(model_dir, head_dir, method, group=None, asked=None, chains=(), **options):
    """Run requests whose drafts are trees; return tokens, the target and the engine's counts.

    chains: steps whose drafts are chains instead.
    """
    config = config_of(method.split()[0], head_dir, **options.pop("changes", {}))
    runner = device_runner(model_dir, config, head=head_dir, group=group, **options)
    target = RecordedTarget(runner)
    control = SpeculationControl("on", 32, NUM_DRAFTS)
    policy = SpeculationPolicy(control, clock=lambda: 0.0, num_tree_tokens=NUM_NODES)
    engine = make_engine(model_dir, config, target, policy=policy)
    tokens = {}
    for each in requests() if asked is None else asked:
        engine.add(each)
        tokens[each.request_id] = []
    while engine.has_work:
        policy._num_tree_tokens = 0 if len(target.outputs) in chains else NUM_NODES
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return tokens, target, engine.stats().counts


@pytest.mark.parametrize(
    ("method", "has_graphs"),
    [
        *(("eagle3", True), ("colocated_draft_model", True), ("medusa", True), ("dflash", True)),
        *(("medusa", False), ("p_eagle", False), ("hydra", False)),
    ],
)
def test_steps_with_trees_run_on_the_device(
    tiny_model_dir, head_dir, expected, on_device, tree_counts, method, has_graphs
):
    """Each yields what the host's path does, with prompts; the host drafts the trees of Hydra."""
    run = [tiny_model_dir, head_dir(method), method]
    changes = {"max_num_batched_tokens": 40, "max_num_seqs": 3}
    options = {"asked": requests(3), "changes": changes, "chains": SWITCHES}
    tokens, host, _ = run_trees(*run, runs_on_device=False, **options)
    assert tokens == {name: expected[name] for name in tokens}
    assert not on_device
    num_trees = sum(tree_counts)
    tree_counts.clear()
    found, target, counts = run_trees(*run, graphs=FakeGraphs() if has_graphs else None, **options)
    assert found == tokens
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    assert len(on_device) == counts.num_steps
    assert num_trees > 5
    assert sum(tree_counts) == (num_trees if method == "hydra" else 0)
    assert sum(any(map(may_have_tree, rows)) for rows in on_device) > 3
    assert counts.speculation.num_accepted_tokens > 0
    if method != "dflash":
        assert len(tree_counts) < counts.num_steps
        assert num_with_drafts(on_device) > 0


@pytest.mark.parametrize("method", ["eagle3", "colocated_draft_model", "medusa", "dflash"])
def test_a_chain_is_drafted_on_the_device_after_a_tree(
    tiny_model_dir, head_dir, expected, on_device, method
):
    """As at the end of a text: by the features of the accepted path, which have moved."""
    [asked] = requests(1)
    text, num_prompt = (*asked.prompt, *expected["r0"]), len(asked.prompt)
    found = []
    for runs_on_device in (False, True):
        config = config_of(method, head_dir(method))
        runner = device_runner(
            tiny_model_dir, config, head=head_dir(method), runs_on_device=runs_on_device
        )
        found.append(steps_after_a_tree(runner, text, num_prompt))
    assert found[0] == found[1]
    assert found[0][1].token_ids == text[num_prompt + 1 : num_prompt + 5]
    assert len(found[0][1].next_draft_token_ids) == NUM_DRAFTS
    are_trees = [bool(row.drafting.parents) for [row] in on_device]
    assert are_trees == [False, True, False]


def may_have_tree(row):
    return bool(row.drafting.parents or row.drafting.held_depth)


def steps_after_a_tree(runner, text, num_prompt):
    """Run a prompt, a tree with the right path 1, 3, 5, and the chain after it; return the rows."""
    base = num_prompt
    table = BlockTableDelta(0, 0, tuple(range(10)))
    admission = SequenceAdmission(0, num_prompt, SamplingRules(temperature=0.0), text[:num_prompt])
    prompt = StepRow(0, 0, text[:base], 0, True, RowDrafting(num_next=NUM_DRAFTS))
    drafts = (3, text[base + 1], 4, text[base + 2], 5, text[base + 3])
    row = StepRow(
        0, base, (text[base], *drafts), 6, True, RowDrafting(parents=(-1, -1, 1, 1, 3, 3))
    )
    steps = [
        StepInput(0, (), (admission,), (table,), (prompt,)),
        StepInput(1, (), (), (), (wanting(row, num_next=NUM_DRAFTS),)),
    ]
    found = [runner.execute(step).rows[0] for step in steps]
    chain = found[-1].next_draft_token_ids
    behind = StepRow(0, base + 4, (text[base + 4], *chain), len(chain), True)
    step = StepInput(2, (), (), (), (wanting(behind, num_next=NUM_DRAFTS),))
    return [*found, runner.execute(step).rows[0]]


def up_to(length):
    """Return requests whose texts become the longest sequence."""
    return [
        replace(each, params=replace(each.params, max_tokens=length - len(each.prompt)))
        for each in requests(3)
    ]


def with_verifiers(*names):
    return [
        replace(each, params=replace(each.params, temperature=0.8, speculation=options))
        for each, options in zip(
            requests(len(names)), (SpeculationOptions(verifier=name) for name in names), strict=True
        )
    ]


def test_trees_are_drafted_on_the_device_beside_rows_that_the_host_verifies(
    tiny_model_dir, head_dir, on_device, tree_counts
):
    """The host drafts chains after these rows, in the same steps."""
    run = [tiny_model_dir, head_dir("eagle3"), "eagle3"]
    options = {"asked": with_verifiers("rejection", None, "block")}
    tokens, host, _ = run_trees(*run, runs_on_device=False, **options)
    assert sum(tree_counts) > 3
    tree_counts.clear()
    found, target, counts = run_trees(*run, **options)
    assert found == tokens
    assert drafts_of(target) == drafts_of(host)
    assert len(on_device) == counts.num_steps
    assert len(tree_counts) > sum(tree_counts) == 0, "the host drafts chains"


RUNS = {
    "sampled": (requests(max_tokens=16)[1:], {"max_num_batched_tokens": 40}),
    "changed logits": (shaped()[:2], {}),
    "to the longest sequence": (up_to(40), {"max_model_len": 40, "num_blocks": 40}),
}


@pytest.mark.parametrize(
    ("method", "of"), every_value(["eagle3", "medusa", "medusa with NaN", "dflash"], list(RUNS))
)
def test_the_trees_are_those_of_the_host(
    tiny_model_dir, head_dir, on_device, tree_counts, method, of
):
    """A step begins after one with trees, and verifies the next ones before the host has them.

    Trees end as chains where the longest sequence has no room for their nodes. Of Medusa with NaN
    the third head has no tokens.
    """
    (asked, changes), run = RUNS[of], [tiny_model_dir, head_dir(method), method]
    options = {"asked": asked, "changes": changes}
    tokens, host, _ = run_trees(*run, runs_on_device=False, **options)
    num_trees = sum(tree_counts)
    tree_counts.clear()
    found, target, counts = run_trees(
        *run, graphs=graphs_of(is_recorded=of == "sampled"), **options
    )
    assert found == tokens
    assert drafts_of(target) == drafts_of(host)
    assert len(on_device) == counts.num_steps
    assert num_trees > 5
    assert not tree_counts, "the host drafts nothing"
    assert target.most_in_flight == 2
    assert any(row.drafting.held_depth for rows in on_device for row in rows)


def test_a_chain_that_was_drafted_beside_a_tree_is_cut_by_depth(tiny_model_dir, head_dir, expected):
    """As where the depth of trees is lowered after the last chain of a text."""
    text = (*requests(1)[0].prompt, *expected["r0"])
    prompts = [text[:length] for length in range(6, 10)]
    rows = [StepRow(i, 0, each, 0, True, RowDrafting(num_next=3)) for i, each in enumerate(prompts)]
    rows[-1] = wanting(rows[-1], num_next=NUM_NODES, next_depth=NUM_DRAFTS)
    wanted = {"drafting": RowDrafting(num_held=4, held_depth=1), "max_end": 40}
    after = [
        StepRow(i, len(each), (PENDING_TOKEN,), 0, True, **wanted) for i, each in enumerate(prompts)
    ]
    steps = [first_step(prompts, rows), StepInput(1, (), (), (), tuple(after[:-1]))]
    on_host, on_device = (
        runner_of("eagle3", tiny_model_dir, head_dir, runs_on_device=each) for each in (False, True)
    )
    assert all(map(on_device.begin, steps))
    found = [on_device.collect() for _ in steps]
    assert found == [on_host.execute(each) for each in steps]
    assert [bool(row.next_draft_parents) for row in found[0].rows] == [False] * 3 + [True]


def first_step(prompts, rows):
    """Return the step that admits a sequence for each prompt."""
    rules = SamplingRules(temperature=0.0)
    admissions = [SequenceAdmission(i, len(each), rules, each) for i, each in enumerate(prompts)]
    tables = [BlockTableDelta(i, 0, tuple(range(10 * i, 10 * i + 10))) for i in range(len(prompts))]
    return StepInput(0, (), tuple(admissions), tuple(tables), tuple(rows))


def drafts_of(target):
    return [
        [(row.token_ids, row.next_draft_token_ids, row.next_draft_parents) for row in each.rows]
        for each in target.outputs
    ]


class SilentGraphs(FakeGraphs):
    """Graphs whose replays launch nothing, so that what is launched beside them can be counted."""

    def capture(self, function):
        super().capture(function)

        def replay():
            self.num_replays += 1

        return replay


def test_a_step_from_tree_to_tree_is_five_graphs_and_two_copies(tiny_model_dir, head_dir):
    """The target's pass, features, verification, pairs, and the whole of the next tree."""
    graphs = SilentGraphs()
    runner = runner_of("eagle3", tiny_model_dir, head_dir, graphs=graphs)
    row = started(runner)
    row = wanting(row, parents=(-1, -1, -1, 0, 0, 1, 3, 3))
    row = row._replace(token_ids=(5, *range(6, 6 + NUM_NODES)), num_draft_tokens=NUM_NODES)
    steps, states = runner.device_steps, runner._batch_state.states([row])
    columns = StepColumns([row])
    assert steps.eligibility.reason(columns, states) is None
    steps.begin(columns, states)  # the table is sent
    graphs.num_replays = 0
    with Operators() as operators:
        steps.begin(columns, states)
    assert graphs.num_replays == 5
    assert operators.counts == {"aten.copy_.default": 2}


@pytest.mark.parametrize("depth", [1, NUM_DRAFTS + 1])
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_tree_that_is_wider_or_deeper_than_configured_is_drafted_by_the_host(
    tiny_model_dir, head_dir, on_device, method, depth
):
    runner = runner_of(method, tiny_model_dir, head_dir)
    row = wanting(started(runner), next_depth=depth)
    assert not runner.begin(StepInput(1, (), (), (), (row,)))
    [verified] = runner.execute(StepInput(1, (), (), (), (row,))).rows
    assert len(verified.next_draft_parents) == NUM_NODES
    assert max(depths(verified.next_draft_parents)) == depth
    assert [each.drafting.num_next for each in on_device[-1]] == [0]


def test_trees_are_as_wide_where_chains_may_be_longer(tiny_model_dir, head_dir):
    """Adaptive lengths of chains change no tree."""
    config = config_of("eagle3", head_dir("eagle3"))
    speculation = replace(config.speculation, adaptive_length=True)
    assert speculation.max_chain_tokens > NUM_DRAFTS
    config = replace(config, speculation=speculation)
    runner = device_runner(tiny_model_dir, config, head=head_dir("eagle3"))
    host = runner_of("eagle3", tiny_model_dir, head_dir, runs_on_device=False)
    step = StepInput(1, (), (), (), (started(runner),))
    assert runner.begin(step)
    started(host)
    assert runner.collect() == host.execute(step)


def test_trees_are_drafted_for_as_many_sequences_as_the_next_step_holds(
    tiny_model_dir, head_dir, monkeypatch
):
    """More have no graph, and the host drafts their trees."""
    monkeypatch.setattr(DeviceStepLimits, "max_growing_rows", 0)
    runner = runner_of("eagle3", tiny_model_dir, head_dir, graphs=FakeGraphs())
    row = started(runner)
    assert not runner.begin(StepInput(1, (), (), (), (row,)))
    [verified] = runner.execute(StepInput(1, (), (), (), (row,))).rows
    assert len(verified.next_draft_parents) == NUM_NODES


def runner_of(method, model_dir, head_dir, **options):
    config = config_of(method, head_dir(method))
    return device_runner(model_dir, config, head=head_dir(method), **options)


def wanting(row, **changes):
    """Return the row with changes to its drafting."""
    return row._replace(drafting=row.drafting._replace(**changes))


def started(runner):
    """Run a prompt; return the row after it, which wants a tree."""
    prompt = (7, 8, 9)
    first = StepRow(0, 0, prompt, 0, True, RowDrafting(num_next=NUM_NODES, next_depth=NUM_DRAFTS))
    [row] = runner.execute(first_step([prompt], [first])).rows
    return first._replace(num_computed_tokens=len(prompt), token_ids=row.token_ids[:1] or (5,))


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash"])
def test_ranks_agree(tiny_model_dir, head_dir, expected, method):
    def on_rank(group):
        run = [tiny_model_dir, head_dir(method), method, group]
        tokens, target, _ = run_trees(*run, asked=requests(2, max_tokens=12))
        return tokens, target.outputs

    found = run_ranks(2, on_rank)
    assert found[0] == found[1]
    assert found[0][0] == {name: expected[name][:12] for name in ("r0", "r1")}
