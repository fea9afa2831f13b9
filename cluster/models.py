"""Which models a configuration names, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.config import ServeConfig
from cluster.resources import Models
from specdec.errors import InvalidValueError
from specdec.model_config import ModelConfig
from specdec.models.store import Progress, resolve
from specdec.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelDirectories:
    """The target, and the draft model where one drafts; the draft may be the target itself."""

    target: Path
    draft: Path | None

    def configs(self) -> Models:
        """What their config.json say; raises UnsupportedModelError."""
        draft = None if self.draft is None else ModelConfig.from_directory(self.draft)
        return Models(ModelConfig.from_directory(self.target), draft)


def resolve_models(config: ServeConfig, progress: Progress) -> ModelDirectories:
    """Finds or fetches the models. Raises ModelNotFoundError or InvalidValueError."""
    target = resolve(config.model, progress=progress)
    speculation = config.speculative_config
    if speculation is None or speculation.method != "draft_model":
        return ModelDirectories(target, None)
    if speculation.model is None:
        return ModelDirectories(target, target)
    draft = resolve(speculation.model, progress=progress)
    _require_same_vocabulary(speculation.model, draft, target)
    return ModelDirectories(target, draft)


def _require_same_vocabulary(name: str, draft: Path, target: Path) -> None:
    sizes = [ModelConfig.from_directory(each).vocab_size for each in (draft, target)]
    if sizes[0] != sizes[1] or Tokenizer(draft).vocabulary != Tokenizer(target).vocabulary:
        limit = "a model with the target's vocabulary, token for token"
        raise InvalidValueError("speculative_config.model", name, limit)
