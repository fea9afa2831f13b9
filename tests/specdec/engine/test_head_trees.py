# Modules: specdec.engine.scheduling.draft_planner
"""The real engine with trees that heads draft: no token changes, and no chain accepts more."""

from dataclasses import replace
from itertools import cycle, product

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.scheduling.async_scheduling import StepsInFlight
from specdec.engine.scheduling.draft_planner import DraftPlanner
from specdec.kernels.cpu import native_library
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.grammar.matcher import MAX_CONSTRAINED_NODES
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import chain, trees
from specdec.types.drafts.draft_tree import depths, first_path, paths
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker import HeadFiles
from specdec.worker.batch.batch_state import BatchState
from tests.combinations import every_value
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import HEADS

K, NUM_NODES = 3, 12
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
QUICK = [("medusa", KERNELS[-1]), ("eagle3", KERNELS[-1]), ("eagle", "torch")]
OTHERS = [each for each in product(HEADS, KERNELS) if each not in QUICK]
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]


def requests(temperature=0.8, **params):
    prompts = [[(31 * place) % 380 + 3 for place in range(22 - 4 * i)] for i in range(4)]
    params = {"temperature": temperature, "max_tokens": 36, **params}
    return [
        request(f"r{i}", [*prompt, 40 + i], seed=i, **params) for i, prompt in enumerate(prompts)
    ]


class Texts:
    """Outputs without speculation, and heads that are fitted to them, made when first used."""

    def __init__(self, directory, new_dir):
        self.directory, self.new_dir = directory, new_dir
        self.outputs, self.heads, self.chains = {}, {}, {}

    def without_speculation(self, temperature):
        if temperature not in self.outputs:
            engine = local_engine(self.directory, engine_config(0))
            self.outputs[temperature] = tokens_by(engine, requests(temperature))
        return self.outputs[temperature]

    def chains_of(self, method, kernels):
        """Return the run of the requests one by one, with chains and no prefix cache."""
        if (method, kernels) not in self.chains:
            limits = {"max_num_seqs": 1, "enable_prefix_caching": False}
            made = Recording(self, method, kernels, 0, **limits)
            self.chains[method, kernels] = made.run(requests())
        return self.chains[method, kernels]

    def head(self, method):
        if method not in self.heads:
            texts = [
                [*each.prompt, *self.without_speculation(temperature)[each.request_id]]
                for temperature in (0.0, 0.8)
                for each in requests()
            ]
            self.heads[method] = HEADS[method](self.directory, self.new_dir(method), texts)
        return self.heads[method]


@pytest.fixture(scope="module")
def texts(tiny_model_dir, tmp_path_factory):
    return Texts(tiny_model_dir, tmp_path_factory.mktemp)


class Recording:
    """An engine, and the drafts that its head made: by request and length of its text."""

    def __init__(
        self, texts, method, kernels="auto", num_nodes=NUM_NODES, keys=None, depth=K, **changes
    ):
        speculation = SpeculativeConfig.of(
            method,
            depth,
            model=str(texts.head(method)),
            **({"num_draft_tree_tokens": num_nodes} if keys is None else keys),
        )
        policy = SpeculationPolicy(
            SpeculationControl("on", 32, depth),
            clock=lambda: 0.0,
            num_tree_tokens=speculation.num_draft_tree_tokens,
        )
        config = engine_config(
            speculation=speculation, **{"max_num_batched_tokens": 160, **changes}
        )
        head = HeadFiles(texts.head(method), method=method)
        self.engine = local_engine(
            texts.directory, config, policy=policy, head=head, kernels=kernels
        )
        self.depth, self.drafts, self.tokens = depth, {}, {}

    def run(self, asked, mode_of=lambda step: "on"):
        for each in asked:
            self.engine.add(each)
            self.tokens[each.request_id] = []
        step = 0
        while self.engine.has_work:
            self.engine.set_speculation(SpeculationControl(mode_of(step), 32, self.depth))
            for output in self.engine.step():
                self.tokens[output.request_id] += output.token_ids
            self.engine.check_integrity()
            for seq in self.engine._scheduler._running:
                draft = seq.head_draft
                if draft is not None and draft.token_ids:
                    self.drafts[seq.request.request_id, draft.base_length] = draft
            step += 1
        return self

    @property
    def counts(self):
        return self.engine.stats().counts


@pytest.mark.parametrize(
    ("method", "kernels", "temperature"), every_value(QUICK, [0.8, 0.0], slow=OTHERS)
)
def test_trees_change_no_token(texts, method, kernels, temperature):
    expected = texts.without_speculation(temperature)
    limits = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    made = Recording(texts, method, kernels, **limits)
    assert made.run(requests(temperature)).tokens == expected
    assert made.counts.num_preemptions > 0
    assert made.counts.num_prefill_chunks > 0
    assert made.counts.speculation.num_accepted_tokens > 0
    trees = [draft for draft in made.drafts.values() if draft.parents is not None]
    assert max(len(draft.token_ids) for draft in trees) == NUM_NODES
    assert max(max(depths(draft.parents)) for draft in trees) == K
    again = made.run(requests(temperature)[::-1], lambda step: "on" if step // 2 % 2 else "off")
    assert again.tokens == expected
    assert again.counts.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("method", "kernels", "temperature", "is_async"),
    every_value(QUICK, [0.0, 0.8, 1.0], [True, False], slow=OTHERS),
)
def test_trees_of_changing_sizes_change_no_token(
    texts, monkeypatch, method, kernels, temperature, is_async
):
    expected, decide = texts.without_speculation(temperature), SpeculationPolicy.decide
    made = Recording(texts, method, kernels, num_nodes=20, async_scheduling=is_async)
    shapes = cycle(each for shape in (*trees(20, K), chain(K), chain(0)) for each in (shape,) * 3)
    sizes, begin = set(), StepsInFlight.begin

    def decide_in_turn(policy, *load):
        policy._decision = replace(decide(policy, *load), shape=next(shapes))
        return policy._decision

    def recorded(self, step_id, rows):
        sizes.update(row.drafting.num_next for _, row in rows)
        begin(self, step_id, rows)

    monkeypatch.setattr(SpeculationPolicy, "decide", decide_in_turn)
    monkeypatch.setattr(StepsInFlight, "begin", recorded)
    assert tokens_by(made.engine, requests(temperature)) == expected
    assert {20, 7, K, 0} <= sizes
    assert (made.counts.num_steps_ahead > 0) == is_async
    assert made.counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("method", "kernels", "batch_size"), every_value(QUICK, [4, 1], slow=OTHERS)
)
def test_a_tree_holds_the_chain_of_an_undisturbed_run(texts, method, kernels, batch_size):
    """So it accepts at least what the chain does, wherever the KV of its head comes from."""
    asked = requests()
    chains = texts.chains_of(method, kernels)
    trees = Recording(texts, method, kernels, max_num_seqs=batch_size).run(asked)
    assert trees.tokens == chains.tokens
    common = trees.drafts.keys() & chains.drafts.keys()
    assert len(common) > 15
    for place in common:
        chain, tree = chains.drafts[place].token_ids, trees.drafts[place]
        path = range(len(tree.token_ids)) if tree.parents is None else first_path(tree.parents)
        first = tuple(tree.token_ids[node] for node in path)
        assert first[: len(chain)] == chain[: len(first)], "shorter near the end of a sequence"
        if len(tree.token_ids) == NUM_NODES:
            assert len(first) == K
    answers = {each.request_id: [*each.prompt, *trees.tokens[each.request_id]] for each in asked}
    num_accepted = [
        sum(longest(drafts[name, length], answers[name][length:]) for name, length in common)
        for drafts in (trees.drafts, chains.drafts)
    ]
    assert num_accepted[0] > num_accepted[1] > 0


def longest(draft, rest):
    """Return how many draft tokens of the best path are right."""
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    texts = [[draft.token_ids[node] for node in path] for path in paths(tuple(parents))]
    return max(len(text) for text in [[], *texts] if text == list(rest[: len(text)]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_tree_runs_no_node_after_the_longest_sequence(texts, kernels):
    """A tree of 10 nodes and depth 8 runs 14 on the way: more than there is room for at the end."""
    limits = {"max_model_len": 48, "block_size": 4}
    expected = tokens_by(
        local_engine(texts.directory, engine_config(**limits)), requests(max_tokens=None)
    )
    made = Recording(texts, "eagle3", kernels, num_nodes=10, depth=8, **limits)
    assert made.run(requests(max_tokens=None)).tokens == expected
    assert {23 - 4 * i + len(expected[f"r{i}"]) for i in range(4)} == {48}
    assert any(draft.parents is not None for draft in made.drafts.values())


def test_trees_of_medusa_choices(texts):
    made = Recording(texts, "medusa", keys={"medusa_choices": [tuple(each) for each in CHOICES]})
    assert made.run(requests()).tokens == texts.without_speculation(0.8)
    shapes = {draft.parents for draft in made.drafts.values() if len(draft.token_ids) == 8}
    assert shapes == {(-1, -1, -1, 0, 0, 1, 3, 3)}
    assert made.counts.speculation.num_accepted_tokens > 0


def test_requests_with_other_verifiers_or_their_own_number_get_chains(texts):
    for options in (
        SpeculationOptions(verifier="rejection"),
        SpeculationOptions(num_speculative_tokens=2),
    ):
        made = Recording(texts, "eagle").run(requests(speculation=options))
        assert made.drafts
        assert all(draft.parents is None for draft in made.drafts.values())


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_rules_of_a_request_follow_the_paths(texts, method):
    rules = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 10}
    asked = requests(**rules)
    plain = local_engine(texts.directory, engine_config(0))
    made = Recording(texts, method).run(asked)
    assert made.tokens == tokens_by(plain, asked)
    assert any(draft.parents is not None for draft in made.drafts.values())


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_a_grammar_prunes_the_trees(texts, method):
    grammar = StructuredOutput(regex="[a-z ]{30,40}")
    compiled = grammar_compiler(texts.directory).compile(grammar)
    params = {"structured_output": grammar, "ignore_eos": False}
    asked = [replace(each, grammar=compiled) for each in requests(**params)]
    expected = tokens_by(local_engine(texts.directory, engine_config(0)), asked)
    made = Recording(texts, method, num_nodes=20).run(asked)
    assert made.tokens == expected
    trees = [draft for draft in made.drafts.values() if draft.parents is not None]
    assert max(len(draft.token_ids) for draft in trees) == MAX_CONSTRAINED_NODES


def test_a_step_is_planned_once_and_the_kv_of_its_trees_moves_once(texts, monkeypatch):
    """The head uses the moves of the target."""
    calls = {"plan": 0, "compaction": 0}

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*arguments):
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, call)

    texts.head("eagle")  # it is fitted with engines, too
    counted(DraftPlanner, "plan")
    counted(BatchState, "compaction")
    made = Recording(texts, "eagle", "torch")
    tokens_by(made.engine, [requests()[0]])
    counts = made.engine.stats().counts
    assert calls["plan"] == counts.num_steps + 1, "the last plan finds no sequence"
    assert 5 < calls["compaction"] < counts.num_steps


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_steps_begin_after_trees_that_the_ranks_hold(texts, method):
    """Tokens are those of steps that begin with the tree of the engine, and so is what it accepts.

    At the end of a text a tree may have been made larger, and then its first nodes are others.
    """
    counts = []
    for is_async in (True, False):
        made = Recording(texts, method, KERNELS[-1], async_scheduling=is_async)
        assert tokens_by(made.engine, requests(0.8)) == texts.without_speculation(0.8)
        counts.append(made.counts)
    ahead, in_turn = counts
    assert ahead.num_steps_ahead > 5
    assert in_turn.num_steps_ahead == 0
    assert ahead.num_steps == pytest.approx(in_turn.num_steps, abs=len(requests()))
    of_both = [each.speculation.num_accepted_tokens for each in counts]
    assert of_both[0] == pytest.approx(of_both[1], abs=len(requests()))
    assert in_turn.speculation.num_accepted_tokens > 30


def test_no_step_begins_after_a_deeper_tree_than_is_wanted(texts, monkeypatch):
    """A device takes the first nodes of a tree; the engine cuts it by depth, too."""
    depths, begin = [{}], StepsInFlight.begin

    def recorded(self, step_id, rows):
        for _, row in rows:
            assert not row.drafting.held_depth or depths[-1][row.seq_id] <= row.drafting.held_depth
        depths.append({row.seq_id: row.drafting.next_depth for _, row in rows})
        begin(self, step_id, rows)

    monkeypatch.setattr(StepsInFlight, "begin", recorded)
    made = Recording(texts, "eagle3", KERNELS[-1], async_scheduling=True)
    engine, tokens = made.engine, {}
    for each in requests(0.8):
        engine.add(each)
        tokens[each.request_id] = []
    depth, num_steps = K, 0
    while engine.has_work:
        if num_steps % 4 == 3:
            depth = 2 * K - 1 - depth
            engine.set_speculation(SpeculationControl("on", 32, depth))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
        num_steps += 1
    assert tokens == texts.without_speculation(0.8)
    assert made.counts.num_steps_ahead > 5
    assert {K - 1, K} <= {depth for step in depths for depth in step.values()}
