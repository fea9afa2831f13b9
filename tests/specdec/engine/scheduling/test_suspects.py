# Modules: specdec.engine.requests.outputs
"""A request whose forward pass ends the target is ended; the others keep their tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from specdec.engine.engine import Engine
from specdec.engine.requests.outputs import TargetLostError
from specdec.engine.scheduling.suspects import Suspects
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.errors import CrashingRequestError, TargetFailedError
from specdec.types.messages import StepRow
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import HashTarget, Transcript, engine_config, make_engine, request

PROMPT_TOKENS = 20
MAX_TOKENS = 12

Kills = Callable[[StepRow], bool]


class MortalTarget(HashTarget):
    """Is lost in the step with a row that kills it, or in its step number `last_step`."""

    def __init__(self, kills: Kills, last_step: int | None = None) -> None:
        super().__init__(block_size=4, vocab_size=383)
        self._kills = kills
        self._last_step = last_step
        self._num_collected = 0

    def collect(self):
        step = self._in_flight[0]
        if self._num_collected == self._last_step or any(map(self._kills, step.rows)):
            raise TargetFailedError("rank 0 of the target ended")
        self._num_collected += 1
        return super().collect()


@dataclass
class Service:
    """An engine whose target restarts after each loss.

    kills: the rows that end a target. deaths: step numbers in which the first targets are lost,
    whatever runs.
    """

    engine: Engine
    kills: Kills = lambda row: False
    deaths: tuple[int, ...] = ()
    targets: list[MortalTarget] = field(default_factory=list)
    generated: dict[tuple[str, int], Transcript] = field(default_factory=dict)

    def __post_init__(self):
        self.restart()

    def restart(self):
        deaths = dict(enumerate(self.deaths))
        self.targets.append(MortalTarget(self.kills, deaths.get(len(self.targets))))
        self.engine.replace_target(self.targets[-1])

    @property
    def num_losses(self):
        return len(self.targets) - 1

    def add(self, each):
        self.generated |= {(each.request_id, i): Transcript() for i in range(each.params.n)}
        self.engine.add(each)

    def step(self):
        try:
            outputs = self.engine.step()
        except TargetLostError as error:
            outputs = [*error.outputs, *self.engine.record_loss()]
            self.restart()
        for output in outputs:
            self.generated[output.request_id, output.choice].add(output)
        self.engine.check_integrity()

    def run(self):
        while self.engine.has_work:
            assert self.num_losses < 12, "the target is lost again and again"
            self.step()

    def errors(self):
        return {name: each.error for (name, _), each in self.generated.items() if each.error}


def prompt(index):
    return [10 + (index + j) % 5 for j in range(PROMPT_TOKENS)]


def requests(count):
    """Their sequences have the ids from 0 on."""
    return [request(f"r{i}", prompt(i), max_tokens=MAX_TOKENS) for i in range(count)]


def service_of(directory, kills=lambda row: False, deaths=(), **changes):
    config = engine_config(**{"max_num_batched_tokens": 48, **changes})
    target = HashTarget(block_size=4, vocab_size=383)
    return Service(make_engine(directory, config, target), kills, deaths)


def in_prefill(seq_id):
    """Kill in the second chunk of the prompt, where it is chunked, or in the only one."""
    return lambda row: row.seq_id == seq_id and row.end == PROMPT_TOKENS


def at_token(seq_id, number):
    """Kill in the pass that samples output token `number`, from 1 on."""

    def kills(row):
        first = row.known_end - PROMPT_TOKENS + 1
        is_sampled = row.samples and first <= number <= first + row.num_guesses
        return row.seq_id == seq_id and is_sampled

    return kills


def in_decoding(seq_id):
    """Kill in every pass of a single known token."""
    return lambda row: row.seq_id == seq_id and row.num_known_tokens == 1


def assert_complete(service, names):
    for name in names:
        transcript = service.generated[name, 0]
        expected = service.targets[0].continuation(prompt(int(name[1:])), MAX_TOKENS)
        assert transcript.token_ids == expected
        assert transcript.finish_reason is FinishReason.LENGTH


KILLERS = {
    "in prefill": in_prefill,
    "at the 5th token": lambda seq_id: at_token(seq_id, 5),
    "in decoding": in_decoding,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_draft_tokens": 3},
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 12},
        {"max_num_seqs": 3, "async_scheduling": True},
        {"max_num_seqs": 1, "async_scheduling": True},
        {"num_blocks": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KILLERS)
def test_only_the_killer_ends(tiny_model_dir, kind, changes):
    service = service_of(tiny_model_dir, KILLERS[kind](4), **changes)
    for each in requests(8):
        service.add(each)
    service.run()
    assert list(service.errors()) == ["r4"]
    assert isinstance(service.errors()["r4"], CrashingRequestError)
    assert service.num_losses == 3, "the first two, and its lone pass"
    assert_complete(service, [f"r{i}" for i in range(8) if i != 4])
    stats = service.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_two_killers_end_and_no_other(tiny_model_dir):
    kills = [in_prefill(1), at_token(4, 2)]
    service = service_of(tiny_model_dir, lambda row: any(each(row) for each in kills))
    for each in requests(6):
        service.add(each)
    service.run()
    assert set(service.errors()) == {"r1", "r4"}
    assert_complete(service, ["r0", "r2", "r3", "r5"])


def test_a_killer_without_company_ends_after_its_lone_pass(tiny_model_dir):
    """Even then two losses may be bad luck."""
    service = service_of(tiny_model_dir, at_token(0, 3))
    service.add(requests(1)[0])
    service.run()
    assert list(service.errors()) == ["r0"]
    assert service.num_losses == 3
    assert "after 2 output tokens: the model process was lost" in str(service.errors()["r0"])


def test_a_killer_with_several_choices_ends_with_all_of_them(tiny_model_dir):
    service = service_of(tiny_model_dir, lambda row: row.seq_id in (1, 2) and in_decoding(1)(row))
    service.add(request("others", prompt(0), max_tokens=MAX_TOKENS))
    service.add(request("killer", prompt(1), max_tokens=MAX_TOKENS, n=2))
    service.run()
    assert list(service.errors()) == ["killer"]
    assert service.generated["others", 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("deaths", [(0, 0), (2, 2), (5, 1), (3, 6), (4,), (2, 8)])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_target_lost_twice_by_bad_luck_ends_nothing(tiny_model_dir, deaths, is_async):
    service = service_of(tiny_model_dir, deaths=deaths, async_scheduling=is_async)
    for each in requests(5):
        service.add(each)
    service.run()
    assert service.num_losses == len(deaths)
    assert service.errors() == {}
    assert_complete(service, [f"r{i}" for i in range(5)])


def test_suspects_run_alone_until_they_have_decoded(tiny_model_dir):
    service = service_of(tiny_model_dir, deaths=(4, 1), async_scheduling=True)
    for each in requests(3):
        service.add(each)
    while service.num_losses < 2:
        service.step()
    late = request("r3", prompt(3), max_tokens=MAX_TOKENS)
    service.add(late)
    service.run()
    steps = service.targets[-1].steps
    lone = [[row.seq_id for row in step.rows] for step in steps[:6]]
    assert lone == [[0], [0], [1], [1], [2], [2]]
    assert len(steps[6].rows) == 4
    assert_complete(service, ["r0", "r1", "r2", "r3"])


def test_a_cleared_suspect_needs_two_more_losses_to_be_one_again(tiny_model_dir):
    service = service_of(tiny_model_dir, deaths=(4, 1, 7))
    for each in requests(2):
        service.add(each)
    service.run()
    assert service.num_losses == 3
    assert service.errors() == {}
    assert len(service.targets[-1].steps[0].rows) == 2, "none runs alone"


def test_losses_with_tokens_decoded_between_make_no_suspects(tiny_model_dir):
    """Two losses far apart, of a node each, do not make long streams run alone."""
    service = service_of(tiny_model_dir, deaths=(4, 4))
    for each in requests(2):
        service.add(each)
    service.run()
    assert service.num_losses == 2
    assert len(service.targets[-1].steps[0].rows) == 2, "none runs alone"
    assert_complete(service, ["r0", "r1"])


def test_an_aborted_suspect_is_skipped(tiny_model_dir):
    service = service_of(tiny_model_dir, in_prefill(0), max_num_batched_tokens=12)
    for each in requests(3):
        service.add(each)
    while service.num_losses < 2:
        service.step()
    service.engine.abort("r0")
    service.run()
    assert service.num_losses == 2
    assert service.errors() == {}
    assert_complete(service, ["r1", "r2"])


def sequence(seq_id):
    return Sequence(seq_id, request("r", [1, 2]), SamplingRules(), detokenizer=None)


def decoded(seq):
    return [(seq, StepRow(seq.seq_id, 4, (7,), 0, True))]


def test_a_sequence_at_one_of_two_losses_is_no_suspect():
    suspects, (first, second, third) = Suspects(), map(sequence, range(3))
    assert suspects.record_loss([first, second]) is None
    assert suspects.current is None
    assert suspects.record_loss([third]) is None
    assert suspects.current is None
    assert suspects.record_loss([second, third]) is None
    assert suspects.current is third


def test_a_loss_without_a_step_in_flight_clears_none():
    suspects, seq = Suspects(), sequence(0)
    for in_flight in ([seq], [], [seq]):
        assert suspects.record_loss(in_flight) is None
    assert suspects.current is seq
    assert suspects.record_loss([]) is None
    assert suspects.current is seq
    assert suspects.record_loss([seq]) is seq
    assert suspects.current is None


def test_a_prefill_chunk_does_not_clear_a_suspect():
    suspects, seqs = Suspects(), [sequence(0), sequence(1)]
    for _ in range(2):
        suspects.record_loss(seqs)
    first, second = seqs
    assert not suspects.complete([(first, StepRow(0, 0, (1, 2), 0, False))])
    assert not suspects.complete([(first, StepRow(0, 0, (1, 2), 0, True))])
    assert suspects.current is first
    assert suspects.complete(decoded(first))
    assert suspects.current is second
    assert not suspects.complete(decoded(second)), "none follows"
    assert suspects.current is None


def test_a_suspect_that_has_ended_is_dropped():
    suspects, seqs = Suspects(), [sequence(0), sequence(1)]
    for _ in range(2):
        suspects.record_loss(seqs)
    seqs[0].status = SequenceStatus.FINISHED
    assert suspects.current is seqs[1]


def test_no_rows_are_read_once_all_of_a_loss_have_decoded_or_ended():
    suspects, (first, second) = Suspects(), (sequence(0), sequence(1))
    suspects.record_loss([first, second])
    second.status = SequenceStatus.FINISHED  # aborted, or ended with its prompt's token
    assert not suspects.complete(decoded(first))
    assert not suspects.complete(iter(pytest.fail, None)), "an iterator that fails when it is read"
