"""Models in this process, on one rank each, as the protocols of `specdec.types.messages`."""

from __future__ import annotations

from collections import deque

from specdec.types.drafters import HeadFile
from specdec.types.messages import DraftOutput, DraftStep, StepInput, VerifyOutput
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.target_model_runner import TargetModelRunner


class LocalTarget:
    """The target model; see Target and HeadTarget. Steps and orders run in the order they came."""

    def __init__(self, runner: TargetModelRunner) -> None:
        self._runner = runner
        # A HeadFile is to be loaded, an int is the version of the head to use.
        self._steps: deque[StepInput | HeadFile | int] = deque()
        self._load_fault: str | None = None

    def begin(self, step: StepInput) -> None:
        """Queue the step; the device begins it now if it can."""
        self._steps.append(step)
        self._begin_on_device()

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step, or run it; then run or begin what is behind it."""
        if self._runner.num_in_flight:
            output = self._runner.collect()
        else:
            step = self._steps.popleft()
            assert isinstance(step, StepInput), "collect without begin"
            output = self._runner.execute(step)
        self._run_orders()
        self._begin_on_device()
        return output

    def _begin_on_device(self) -> None:
        """Let the device begin the next steps, as far as they need not wait."""
        while self._steps and isinstance(step := self._steps[0], StepInput):
            if not self._runner.begin(step):
                break
            self._steps.popleft()

    def begin_head_load(self, head: HeadFile) -> None:
        """Load the head behind the steps that were begun."""
        self._load_fault = None
        self._steps.append(head)
        self._run_orders()

    def collect_head_load(self) -> str | None:
        """See HeadTarget."""
        return self._load_fault

    def switch_head(self, version: int) -> None:
        """Switch behind the steps that were begun."""
        self._steps.append(version)
        self._run_orders()

    def _run_orders(self) -> None:
        """Run the orders before the next step."""
        versions = self._runner.head_versions
        while self._steps and not isinstance(self._steps[0], StepInput):
            assert versions is not None, "the target has no draft head"
            order = self._steps.popleft()
            if isinstance(order, HeadFile):
                self._load_fault = versions.load(order)
            elif isinstance(order, int):
                versions.switch(order)


class LocalDraftWorker:
    """The draft model; see DraftWorker."""

    def __init__(self, runner: DraftModelRunner) -> None:
        self._runner = runner
        self._output: DraftOutput | None = None

    def begin(self, step: DraftStep) -> None:
        """Run the whole step."""
        self._output = self._runner.draft(step)
        self._runner.catch_up(step)

    def collect(self) -> DraftOutput:
        """Return the drafts that `begin` made."""
        assert self._output is not None, "collect without begin"
        return self._output

    @property
    def is_busy(self) -> bool:
        return False
