"""Runs of an engine on a model in this process, with a record of its steps, drafts and tokens."""

from collections import defaultdict
from dataclasses import dataclass, field

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles, LocalTarget, RankModel, load_target
from tests.specdec.engines import Transcript, engine_config, make_engine, request

K = 4


def prompt(index):
    return [(29 * index + 31 * place) % 380 + 3 for place in range(9 + 3 * index)]


def requests():
    return [
        request("greedy", prompt(0), max_tokens=30),
        request("short", prompt(1), max_tokens=1),
        request("drawn", prompt(2), temperature=0.9, top_p=0.95, seed=7, max_tokens=17),
        request("penalties", prompt(3), repetition_penalty=1.3, frequency_penalty=0.5),
        request("stops", prompt(0), temperature=1.0, seed=3, ignore_eos=False, max_tokens=60),
        request("choices", prompt(1), temperature=0.8, seed=5, n=3, max_tokens=14),
        request("logprobs", prompt(3), logprobs=2, prompt_logprobs=1, stop=["he"], max_tokens=40),
        request("own", prompt(4), max_tokens=31, speculation=SpeculationOptions(None, 2)),
        request("out", prompt(2), max_tokens=12, speculation=SpeculationOptions(enabled=False)),
    ]


class SpiedTarget(LocalTarget):
    """Keeps every step as it was sent, and whether it was begun while another was in flight."""

    def __init__(self, runner):
        super().__init__(runner)
        self.steps = []

    def begin(self, step):
        self.steps.append((step, bool(self._steps)))
        super().begin(step)

    @property
    def num_in_flight(self):
        return len(self._steps)

    @property
    def num_ahead(self):
        return sum(is_ahead for _, is_ahead in self.steps)

    @property
    def num_held(self):
        """Rows that took their drafts on the rank."""
        return sum(row.drafting.num_held > 0 for step, _ in self.steps for row in step.rows)


@dataclass
class Outcome:
    """Tokens of a run, and the drafts that were verified: by choice and length of the text."""

    tokens: dict = field(default_factory=dict)
    drafts: dict = field(default_factory=dict)
    counts: object = None
    target: SpiedTarget | None = None


def target_with_head(directory, config, head_dir, kernels="torch", group=None):
    runner = load_target(
        RankModel(
            directory,
            "float32",
            config,
            kernels=kernels,
            head=HeadFiles(head_dir, method=config.speculation.head.name),
        ),
        group or TensorParallelGroup(),
    )
    return SpiedTarget(runner)


class Run:
    """An engine that records its tokens and the drafts of the steps that it collects."""

    def __init__(self, directory, config, target, policy=None):
        self.target = target
        self.engine = make_engine(directory, config, target, policy=policy)
        self.transcripts = defaultdict(Transcript)
        self.drafts = {}

    @classmethod
    def with_head(
        cls,
        directory,
        head_dir,
        method="medusa",
        kernels="torch",
        group=None,
        speculation=None,
        **changes,
    ):
        keys = SpeculativeConfig.of(method, K, model=str(head_dir), **(speculation or {}))
        config = engine_config(speculation=keys, **changes)
        target = target_with_head(directory, config, head_dir, kernels, group)
        policy = SpeculationPolicy(SpeculationControl("on", 32, K), clock=lambda: 0.0)
        return cls(directory, config, target, policy)

    def step(self):
        collect = self.engine._steps.collect

        def spied_collect():
            step = collect()
            for seq, row in step.rows:
                if row.drafts and seq.status.value == "running":
                    place = seq.request.request_id, seq.choice, row.known_end
                    self.drafts.setdefault(place, []).append(row.drafts)
            return step

        self.engine._steps.collect = spied_collect
        for output in self.engine.step():
            self.transcripts[output.request_id, output.choice].add(output)
        self.engine._steps.collect = collect
        self.engine.check_integrity()

    def finish(self, asked=()):
        for each in asked:
            self.engine.add(each)
        while self.engine.has_work:
            self.step()
        return Outcome(self.tokens, self.drafts, self.engine.stats().counts, self.target)

    @property
    def tokens(self):
        return {
            name: (
                each.token_ids,
                each.text,
                each.finish_reason,
                [row.round(2).tolist() for part in each.logprobs for row in part.logprobs],
            )
            for name, each in self.transcripts.items()
        }
