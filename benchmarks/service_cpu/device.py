"""A device that computes nothing: its steps take given times, one after the other, and are logged.

`ClockedRunner` stands for the model runner of a rank, in the process of a rank of the service or in
that of an engine. Speed and log are files of the model's directory, which every process reads.
"""

from __future__ import annotations

import json
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.types.messages import StepInput, VerifiedRow, VerifyOutput

MAX_IN_FLIGHT = 2
SPEED_FILE, STEPS_FILE, LINE_FILE = "device.json", "steps.bin", "line.json"
_FIRST_TOKEN, _NUM_TOKENS = 1000, 39_000
_RECORD = struct.Struct("6d")


@dataclass(frozen=True)
class DeviceSpeed:
    """Milliseconds of a step, of each of its decode rows and of each prompt token.

    The defaults are those of an H100 with a model of 8B parameters in bfloat16.
    """

    step_ms: float = 6.4
    decode_ms: float = 0.0159
    prompt_ms: float = 0.026

    def seconds(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the time of a step."""
        rows_ms = self.decode_ms * num_decodes + self.prompt_ms * num_prompt_tokens
        return (self.step_ms + rows_ms) / 1e3


INSTANT = DeviceSpeed(0.0, 0.0, 0.0)


class StepRecord(NamedTuple):
    """A step of the device. idle_s: without work before it. was_ahead: 1 if a step was in flight.

    Times are of `time.perf_counter`, which all processes of a machine share.
    """

    begun_at_s: float
    idle_s: float
    seconds: float
    num_decodes: float
    num_prompt_tokens: float
    was_ahead: float

    @property
    def ends_at_s(self) -> float:
        """When the device has run it; the idle time lies between the steps."""
        return self.begun_at_s + self.seconds


class StepQueue:
    """Times of the steps of a device, each of which runs when the one before it has ended."""

    def __init__(self, speed: DeviceSpeed) -> None:
        self._speed = speed
        self._free_at_s = 0.0

    def add(
        self, now_s: float, num_decodes: int, num_prompt_tokens: int, *, was_ahead: bool
    ) -> StepRecord:
        """Queue a step at a time that is not before that of the last one."""
        starts_at_s = max(now_s, self._free_at_s)
        idle_s = starts_at_s - self._free_at_s
        seconds = self._speed.seconds(num_decodes, num_prompt_tokens)
        self._free_at_s = starts_at_s + seconds
        return StepRecord(
            starts_at_s, idle_s, seconds, num_decodes, num_prompt_tokens, float(was_ahead)
        )


class ClockedRunner:
    """Model runner of a device of the speed in a model's directory; logs its steps there.

    Has the part of TargetModelRunner that TargetSteps and LocalTarget need without heads and
    adapters. Tokens are arbitrary, drafts are not accepted.
    """

    head_versions = None
    adapters = None

    def __init__(self, directory: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._queue = StepQueue(read_speed(directory))
        self._in_flight: deque[tuple[StepInput, float]] = deque()  # with the time of their ends
        self._log = (directory / STEPS_FILE).open("ab", buffering=0)

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were begun and not collected."""
        return len(self._in_flight)

    @property
    def is_step_done(self) -> bool:
        """Return whether the oldest step has ended."""
        return self._clock() >= self._in_flight[0][1]

    def needs_results(self, step: StepInput) -> bool:
        """Return False: no step depends on the results of the one before it."""
        del step
        return False

    def settle(self) -> None:
        """Do nothing: the device has no state."""

    def begin(self, step: StepInput) -> bool:
        """Queue a step, unless it has no rows or the queue is full."""
        if not step.rows or len(self._in_flight) == MAX_IN_FLIGHT:
            return False
        num_decodes = sum(len(row.token_ids) == 1 for row in step.rows)
        num_prompt_tokens = sum(len(row.token_ids) for row in step.rows) - num_decodes
        was_ahead = bool(self._in_flight)
        record = self._queue.add(self._clock(), num_decodes, num_prompt_tokens, was_ahead=was_ahead)
        self._log.write(_RECORD.pack(*record))
        self._in_flight.append((step, record.ends_at_s))
        return True

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step."""
        step, ends_at_s = self._in_flight.popleft()
        if (remaining_s := ends_at_s - self._clock()) > 0:
            time.sleep(remaining_s)
        return _output(step)

    def execute(self, step: StepInput) -> VerifyOutput:
        """Run a step by itself."""
        return self.collect() if self.begin(step) else _output(step)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _output(step: StepInput) -> VerifyOutput:
    rows = tuple(
        VerifiedRow(row.seq_id, (_token(step.step_id, row.seq_id),))
        for row in step.rows
        if row.samples
    )
    return VerifyOutput(step.step_id, rows)


def _token(step_id: int, seq_id: int) -> int:
    return _FIRST_TOKEN + (step_id * 7919 + seq_id * 104_729) % _NUM_TOKENS


def write_clocked_model(directory: Path, source: Path, speed: DeviceSpeed) -> Path:
    """Make the directory of a model with the files of another one and a speed; return it."""
    directory.mkdir(parents=True)
    for file in source.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    (directory / SPEED_FILE).write_text(json.dumps(asdict(speed)))
    return directory


def read_speed(directory: Path) -> DeviceSpeed:
    """Return the speed of the device that runs a model."""
    return DeviceSpeed(**json.loads((directory / SPEED_FILE).read_text()))


def read_steps(directory: Path, since_s: float, until_s: float) -> list[StepRecord]:
    """Return the logged steps that began in a period, in order."""
    values = np.fromfile(directory / STEPS_FILE).reshape(-1, len(StepRecord._fields))
    records = (StepRecord(*row) for row in values.tolist())
    return [each for each in records if since_s <= each.begun_at_s <= until_s]


@dataclass(frozen=True)
class DeviceUse:
    """Use of the device between its first and its last step of a load.

    idle_share: of the time. Per step: mean idle milliseconds before it, and the share of steps that
    were begun while another was in flight; None without such steps. Steps with prompts may also
    decode.
    """

    idle_share: float
    decode_idle_ms: float | None
    decode_ahead_share: float | None
    prompt_idle_ms: float | None
    prompt_ahead_share: float | None
    prompt_tokens_per_step: float | None
    num_steps: float = 0

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> DeviceUse:
        """Summarize the steps of a load; before the first one the device waits for no engine."""
        rest = steps[1:]
        decodes = [each for each in rest if not each.num_prompt_tokens]
        prompts = [each for each in rest if each.num_prompt_tokens]
        idle_s = sum(each.idle_s for each in rest)
        total_s = idle_s + sum(each.seconds for each in steps)
        return cls(
            idle_s / total_s if total_s else 0.0,
            _mean([1e3 * each.idle_s for each in decodes]),
            _mean([each.was_ahead for each in decodes]),
            _mean([1e3 * each.idle_s for each in prompts]),
            _mean([each.was_ahead for each in prompts]),
            _mean([each.num_prompt_tokens for each in prompts]),
            len(steps),
        )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
