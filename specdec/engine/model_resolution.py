"""Which models a configuration names, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specdec.config.engine import DTYPE_BYTES
from specdec.config.llm import Config, LLMConfig
from specdec.models.config import ModelConfig
from specdec.models.hub import Progress
from specdec.models.resolve import resolve
from specdec.speculation.proposers import DraftVocabulary
from specdec.text.vocab_map import require_enough_shared
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class Models:
    """The shapes of the target and, where one drafts, of the draft model."""

    target: ModelConfig
    draft: ModelConfig | None = None


@dataclass(frozen=True)
class ModelDirectories:
    """The target, and the draft model where one drafts; the draft may be the target itself."""

    target: Path
    draft: Path | None

    def configs(self) -> Models:
        """What their config.json say; raises UnsupportedModelError."""
        draft = None if self.draft is None else ModelConfig.from_directory(self.draft)
        return Models(ModelConfig.from_directory(self.target), draft)


def with_resolved_dtype(config: Config, models: Models) -> Config:
    """The configuration with what its dtype stands for, where that is auto.

    Raises InvalidValueError where the checkpoint is in no type that a model can be run in.
    """
    if config.dtype != "auto":
        return config
    named = models.target.checkpoint_dtype
    for dtype in DTYPE_BYTES:
        if dtype == named:
            return replace(config, dtype=dtype)
    limit = f"one of {', '.join(DTYPE_BYTES)} for a model whose config.json says {named}"
    raise InvalidValueError("dtype", config.dtype, limit)


def resolve_models(config: LLMConfig, progress: Progress) -> ModelDirectories:
    """Finds or fetches the models. Raises ModelNotFoundError.

    Raises InvalidValueError for a draft model whose vocabulary has too little in common with the
    target's, and UnsupportedModelError where that cannot be known.
    """
    target = resolve(config.model, progress=progress)
    if config.draft_model is None:
        return ModelDirectories(target, None)
    name = config.draft_model.model
    if name is None:
        return ModelDirectories(target, target)
    draft = resolve(name, progress=progress)
    shared = DraftVocabulary.between(draft, target).shared
    if shared is not None:
        require_enough_shared(shared, "speculative_config.model", name)
    return ModelDirectories(target, draft)
