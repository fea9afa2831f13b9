"""The draft model in a process: a target's steps wait for its drafts; its end is an error."""

import pytest
import torch

from specdec.config.engine import DraftLimits
from specdec.llm.draft_process import DraftingTarget, DraftProcess
from specdec.types.errors import DraftFailedError
from specdec.types.messages import StepInput, StepRow
from specdec.worker import RankModel


class RecordingTarget:
    """Target that records its calls."""

    def __init__(self, calls):
        self._calls = calls

    def begin(self, step):
        self._calls.append("begin")

    def collect(self):
        self._calls.append("collect")
        return "output"


def test_a_step_begins_when_its_drafts_are_made():
    calls = []
    target = DraftingTarget(RecordingTarget(calls), lambda count: calls.append(count))
    for count in (0, 2):
        target.begin(StepInput(0, (), (), (), (StepRow(0, 5, (1, 2, 3), count, samples=True),)))
        assert target.collect() == "output"
    target.begin(StepInput(0, (), (), (), ()))
    assert calls == ["begin", "collect", 2, "begin", "collect", "begin"]


def model(directory):
    limits = DraftLimits(num_blocks=16, block_size=16, max_model_len=32, max_catch_up_tokens=64)
    return RankModel(directory, "float32", limits, device=torch.device("cpu"), kernels="torch")


@pytest.mark.slow  # processes that import torch
def test_a_process_drafts_and_its_end_is_an_error(tiny_model_dir, tmp_path):
    with DraftProcess(model(tiny_model_dir), 3) as process:
        process.draft(3)
        process.draft(1)
        process._process.kill()
        process._process.join()
        with pytest.raises(DraftFailedError, match="the process of the draft model has ended"):
            process.draft(1)
    assert not process._process.is_alive()
    with pytest.raises(DraftFailedError), DraftProcess(model(tmp_path), 3):
        pytest.fail("a model without files was loaded")
