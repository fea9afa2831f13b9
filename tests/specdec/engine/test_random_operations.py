"""Random operations on an engine, whose blocks and sequences are checked after each."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specdec.engine.engine import Engine
from specdec.types.request import ThinkingBudget
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engine.test_engine import VOCAB_SIZE
from tests.specdec.engines import (
    HashTarget,
    Transcript,
    engine_config,
    make_engine,
    request,
)

MARK = (10, 12, 14)


class EngineMachine(RuleBasedStateMachine):
    """Requests are added, run and aborted in random order; the KV pool is too small for all."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.target = HashTarget(4, VOCAB_SIZE)
        self.engine: Engine = make_engine(
            self.tiny_model_dir,
            engine_config(3, num_blocks=40, max_num_seqs=5, max_num_batched_tokens=20),
            self.target,
        )
        self.prompts: dict[str, list[int]] = {}
        self.budgets: dict[str, int] = {}
        self.generated: dict[tuple[str, int], Transcript] = {}  # by request and choice

    @rule(
        target=requests,
        length=st.integers(1, 60),
        first=st.integers(0, 4),
        max_tokens=st.integers(1, 60),
        enabled=st.booleans(),
        n=st.integers(1, 3),
        budget=st.none() | st.integers(1, 30),
    )
    def add(
        self, length: int, first: int, max_tokens: int, enabled: bool, n: int, budget: int | None
    ) -> str:
        name = f"r{len(self.prompts)}"
        self.prompts[name] = [10 + (first * i) % 5 for i in range(length)]
        self.generated |= {(name, choice): Transcript() for choice in range(n)}
        params = {"max_tokens": max_tokens, "speculation": SpeculationOptions(enabled=enabled)}
        each = request(name, self.prompts[name], n=n, **params)
        if budget is not None and n == 1:
            thinking = ThinkingBudget(budget, MARK, lambda _: True)
            each = replace(each, thinking_budget=thinking)
            self.budgets[name] = budget
        self.engine.add(each)
        return name

    @rule()
    def replace_the_target(self) -> None:
        self.engine.replace_target(HashTarget(4, VOCAB_SIZE))

    @rule(name=consumes(requests))
    def abort(self, name: str) -> None:
        self.engine.abort(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step() if self.engine.has_work else ():
                self.generated[output.request_id, output.choice].add(output)

    @invariant()
    def generated_tokens_are_the_expected_ones(self) -> None:
        self.engine.check_integrity()
        for (name, _), generated in self.generated.items():
            assert generated.token_ids == self.expected(name, len(generated.token_ids))

    def expected(self, name: str, count: int) -> list[int]:
        prompt, budget = self.prompts[name], self.budgets.get(name)
        if budget is None or count <= budget:
            return self.target.continuation(prompt, count)
        known = [*self.target.continuation(prompt, budget), *MARK]
        return known + self.target.continuation(prompt + known, count - len(known))

    def teardown(self) -> None:
        for name in self.prompts:
            self.engine.abort(name)
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_random_operations(tiny_model_dir):
    machine = type("Machine", (EngineMachine,), {"tiny_model_dir": tiny_model_dir})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    case().runTest()
