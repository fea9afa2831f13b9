"""Which models a configuration names, and where they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ServeConfig
from cluster.resources import Models
from specdec.model_config import ModelConfig
from specdec.models.store import Progress, resolve
from specdec.proposers import DraftVocabulary
from specdec.vocabulary import require_enough_shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model by the name that it was asked for, and where the Router's node has it."""

    name: str
    directory: Path

    def here(self) -> Path:
        """Where this node has it, fetched if need be. Raises ModelNotFoundError."""
        return self.directory if self.directory.is_dir() else resolve(self.name, progress=_log)


def _log(line: str) -> None:
    logger.info("%s", line)


@dataclass(frozen=True)
class ModelDirectories:
    """The target, and the draft model where one drafts; the draft may be the target itself."""

    target: Path
    draft: Path | None

    def configs(self) -> Models:
        """What their config.json say; raises UnsupportedModelError."""
        draft = None if self.draft is None else ModelConfig.from_directory(self.draft)
        return Models(ModelConfig.from_directory(self.target), draft)


@dataclass(frozen=True)
class FoundByDriver:
    """What whoever deploys has found out, where there is one node alone.

    memory_bytes: what a replica may take. num_sharing: replicas that share the node's cores.
    """

    directories: ModelDirectories
    memory_bytes: int
    num_sharing: int


def resolve_models(config: ServeConfig, progress: Progress = _log) -> ModelDirectories:
    """Finds or fetches the models. Raises ModelNotFoundError.

    Raises InvalidValueError for a draft model whose vocabulary has too little in common with the
    target's, and UnsupportedModelError where that cannot be known.
    """
    target = resolve(config.model, progress=progress)
    speculation = config.speculative_config
    if speculation is None or speculation.method != "draft_model":
        return ModelDirectories(target, None)
    if speculation.model is None:
        return ModelDirectories(target, target)
    draft = resolve(speculation.model, progress=progress)
    shared = DraftVocabulary.between(draft, target).shared
    if shared is not None:
        require_enough_shared(shared, "speculative_config.model", speculation.model)
    return ModelDirectories(target, draft)
