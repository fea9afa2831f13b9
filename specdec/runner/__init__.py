"""Runs the models: one rank's workers."""

from specdec.kernels.native import native_library_fault
from specdec.runner.draft_runner import DraftRunner
from specdec.runner.loading import load_draft_runner, load_runner
from specdec.runner.local import LocalDraftWorker, LocalTarget
from specdec.runner.model_runner import ModelRunner
from specdec.runner.rendezvous import Rendezvous
from specdec.runner.runner import Runner
from specdec.runner.step_profiler import StepProfiler

__all__ = [
    "DraftRunner",
    "LocalDraftWorker",
    "LocalTarget",
    "ModelRunner",
    "Rendezvous",
    "Runner",
    "StepProfiler",
    "load_draft_runner",
    "load_runner",
    "native_library_fault",
]
