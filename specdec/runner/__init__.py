"""Runs the model: one rank's worker, and the seam by which the engine reaches it."""

from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from specdec.runner.target import LocalTarget, Target

__all__ = ["LocalTarget", "ModelRunner", "Target", "load_runner"]
