"""Runs the models: one rank's workers, and the seams by which engine and proposer reach them."""

from specdec.kernels.native import native_library_fault
from specdec.runner.draft_runner import DraftRunner
from specdec.runner.draft_worker import DraftWorker, LocalDraftWorker
from specdec.runner.loading import load_draft_runner, load_runner
from specdec.runner.model_runner import ModelRunner
from specdec.runner.rendezvous import Rendezvous
from specdec.runner.runner import Runner
from specdec.runner.step_profiler import StepProfiler
from specdec.runner.target import LocalTarget, Target

__all__ = [
    "DraftRunner",
    "DraftWorker",
    "LocalDraftWorker",
    "LocalTarget",
    "ModelRunner",
    "Rendezvous",
    "Runner",
    "StepProfiler",
    "Target",
    "load_draft_runner",
    "load_runner",
    "native_library_fault",
]
