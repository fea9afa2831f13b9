"""Models in this process, on one rank each, as the protocols of `specdec.types.ranks`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import AheadOutput, DraftOutput, DraftStep
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput
from specdec.worker.adapters import RankAdapters
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.head.versions import HeadVersions
from specdec.worker.model_runner import ModelRunner
from specdec.worker.target_model_runner import TargetModelRunner


class _AdapterLoads:
    """Loads adapters into a model of this process; see AdapterRanks."""

    _runner: ModelRunner
    _adapter_fault: str | None = None

    def begin_adapter_load(self, adapter: AdapterFile) -> None:
        """Load the adapter after the steps that were begun."""
        self._adapter_fault = None
        self._order(lambda: self._load_adapter(adapter))

    def collect_adapter_load(self) -> str | None:
        """See AdapterRanks."""
        return self._adapter_fault

    def unload_adapter(self, adapter_id: int) -> None:
        """Free the adapter after the steps that were begun."""
        self._order(lambda: self._adapters.unload(adapter_id))

    def _order(self, order: Callable[[], None]) -> None:
        """Run an order after the steps that were begun; here all of them have run."""
        order()

    def _load_adapter(self, adapter: AdapterFile) -> None:
        self._adapter_fault = self._adapters.load(adapter)

    @property
    def _adapters(self) -> RankAdapters:
        assert self._runner.adapters is not None, "the model was loaded without adapters"
        return self._runner.adapters


class LocalTarget(_AdapterLoads):
    """The target model; see Target, HeadTarget and AdapterTarget.

    Steps and orders run in the order they came.
    """

    _runner: TargetModelRunner

    def __init__(self, runner: TargetModelRunner) -> None:
        self._runner = runner
        self._steps: deque[StepInput | Callable[[], None]] = deque()  # functions are orders
        self._load_fault: str | None = None

    def begin(self, step: StepInput) -> None:
        """Queue the step; the device begins it now if it can."""
        self._steps.append(step)
        self._begin_on_device()

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step, or run it; then run or begin what comes after it."""
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

    def close(self) -> None:
        """Drop the steps that were begun, and what the device keeps for steps; none may follow."""
        self._steps.clear()
        self._runner.close()

    def begin_head_load(self, head: HeadFile) -> None:
        """Load the head after the steps that were begun."""
        self._load_fault = None
        self._order(lambda: self._load_head(head))

    def collect_head_load(self) -> str | None:
        """See HeadTarget."""
        return self._load_fault

    def switch_head(self, version: int) -> None:
        """Switch after the steps that were begun."""
        self._order(lambda: self._versions.switch(version))

    @property
    def _versions(self) -> HeadVersions:
        assert self._runner.head_versions is not None, "the target has no draft head"
        return self._runner.head_versions

    def _load_head(self, head: HeadFile) -> None:
        self._load_fault = self._versions.load(head)

    def _order(self, order: Callable[[], None]) -> None:
        self._steps.append(order)
        self._run_orders()

    def _run_orders(self) -> None:
        """Run the orders before the next step."""
        while self._steps and not isinstance(order := self._steps[0], StepInput):
            self._steps.popleft()
            order()


class LocalDraftWorker(_AdapterLoads):
    """The draft model; see DraftWorker and AdapterRanks.

    It shares the thread of the target, so nothing overlaps.
    """

    _runner: DraftModelRunner

    def __init__(self, runner: DraftModelRunner) -> None:
        self._runner = runner
        self._output: DraftOutput | None = None
        self._ahead: list[AheadOutput] = []

    def close(self) -> None:
        """Drop what the device keeps for steps; none may follow."""
        self._runner.close()

    def begin(self, step: DraftStep) -> None:
        """Run the whole step."""
        output = self._runner.draft(step)
        if step.drafts:
            self._output = output
        self._runner.catch_up(step)
        if step.ahead:
            self._ahead.append(self._runner.draft_ahead(step))

    def collect(self) -> DraftOutput:
        """Return the drafts that `begin` made."""
        assert self._output is not None, "collect without begin"
        return self._output

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return what `begin` has drafted ahead."""
        del wait
        outputs, self._ahead = self._ahead, []
        return outputs

    def poll_busy(self) -> bool:
        """See DraftWorker; `begin` returns when all has run."""
        return False
