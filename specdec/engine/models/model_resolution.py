"""Resolves the models that a configuration names to directories and shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specdec.config.engine import DEFAULT_MODEL_OPTIONS, DTYPE_BYTES, ModelOptions
from specdec.config.hf_overrides import unknown_keys
from specdec.config.llm import Config, LLMConfig
from specdec.config.model_aliases import ALIASES, TARGETS_OF_DRAFTERS
from specdec.config.speculation.head_methods import HeadMethodConfig
from specdec.config.speculation.methods import DraftModelConfig
from specdec.engine.models.checkpoint_lint import require_loadable
from specdec.models.config.config_files import read_json
from specdec.models.config.end_tokens import read_end_tokens, unused_end_tokens
from specdec.models.config.model_config import ModelConfig
from specdec.models.drafters.token_map import token_map_of
from specdec.models.heads.config import HeadConfig, separate_head_method_of
from specdec.models.hub import Progress
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.speculation.proposers import DraftVocabulary
from specdec.text.vocab_map import require_enough_shared
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class Models:
    """The configurations of the target, and of the draft model or draft head, if there is one."""

    target: ModelConfig
    draft: ModelConfig | None = None
    head: HeadConfig | None = None


@dataclass(frozen=True)
class ModelDirectories:
    """The directories of the target, and of the draft model or head, if any.

    That of the draft model may be the target's. options: of the target. head_method: of the head.
    """

    target: Path
    draft: Path | None
    head: Path | None = None
    options: ModelOptions = DEFAULT_MODEL_OPTIONS
    head_method: str | None = None

    def configs(self) -> Models:
        """Read each config.json, and the shapes of a head. Raises UnsupportedModelError."""
        target = ModelConfig.from_directory(self.target, self.options)
        draft = None if self.draft is None else ModelConfig.from_directory(self.draft)
        if self.head is None:
            return Models(target, draft)
        head = HeadConfig.from_directory(self.head, target, method=self.head_method)
        return Models(target, draft, head)


def with_resolved_dtype(config: Config, models: Models) -> Config:
    """Return the configuration with the checkpoint's dtype in place of "auto".

    On a GPU bfloat16 in place of float32, which its matrix units multiply at a fraction of their
    speed.

    Raises InvalidValueError where that dtype is not supported.
    """
    if config.dtype != "auto":
        return config
    named = models.target.checkpoint_dtype
    for dtype in DTYPE_BYTES:
        if dtype == named:
            is_slow = dtype == "float32" and config.device == "cuda"
            return replace(config, dtype="bfloat16" if is_slow else dtype)
    limit = f"one of {', '.join(DTYPE_BYTES)} for a model whose config.json has {named}"
    raise InvalidValueError("dtype", config.dtype, limit)


def resolve_models(config: LLMConfig, progress: Progress) -> ModelDirectories:
    """Find or download the models. Raises ModelNotFoundError.

    Raises InvalidValueError for a draft model whose vocabulary shares too little with the target's,
    or a drafter of this package that was made for another target, and UnsupportedModelError where
    that cannot be determined.
    """
    target = resolve(config.model, progress=progress)
    found = ModelConfig.from_directory(target, config.model_options)
    if added := unknown_keys(read_json(target / "config.json") or {}, config.hf_overrides):
        progress(f"{config.model}: config.json has no {', '.join(added)}, which hf_overrides adds")
    if whole := found.text_part_of:
        progress(f"{config.model}: the text model of {whole} is served; it reads no images")
    if found.transformers is not None:
        progress(f"{config.model}: transformers' code runs {found.architecture}")
    named = read_end_tokens(target, config.model_options)
    if note := unused_end_tokens(named, found.vocab_size):
        progress(f"{config.model}: {note}")
    head, drafting = config.head, config.draft_model
    for each in (head, drafting):
        if each is not None and each.model is not None:
            _require_own_target(each.model, target)
    return ModelDirectories(
        target,
        None
        if drafting is None
        else _resolve_draft(drafting, target, config.model_options, progress),
        None
        if head is None
        else _resolve_head(head, target, found, config.model_options, progress),
        config.model_options,
        None if head is None else head.name,
    )


def _require_own_target(drafter: str, target: Path) -> None:
    """Raise InvalidValueError for a drafter of this package that was made for other weights."""
    alias = TARGETS_OF_DRAFTERS.get(drafter)
    if alias is not None and weights_fingerprint(target) != ALIASES[alias].weights_sha256:
        limit = f"a drafter for the weights in {target}: this one was made for {alias}"
        raise InvalidValueError("speculative_config.model", drafter, limit)


def _resolve_draft(
    drafting: DraftModelConfig, target: Path, options: ModelOptions, progress: Progress
) -> Path:
    """Find or download a draft model; without a name it is the target. options: of the target."""
    name = drafting.model
    if name is None:
        return target
    draft = resolve(name, progress=progress)
    _require_model(draft)
    model = ModelConfig.from_directory(draft)
    token_map_of(draft, drafting.speculative_token_map, model.vocab_size)  # before a rank reads it
    vocabulary = DraftVocabulary.between(draft, target, options)
    if vocabulary.shared is not None:
        require_enough_shared(vocabulary.shared, "speculative_config.model", name)
    if model.recurrent is not None and not vocabulary.drafts_ahead:
        limit = "a model with the target's tokenizer: recurrent layers do not run text again"
        raise InvalidValueError("speculative_config.model", name, limit)
    return draft


def _require_model(directory: Path) -> None:
    """Raise InvalidValueError for a draft model whose files are those of a head."""
    method = separate_head_method_of(directory)
    if method is not None:
        limit = f"{method}: {directory} is a head of that method, not a model"
        raise InvalidValueError("speculative_config.method", DraftModelConfig.name, limit)


def has_same_tokens(draft: Path, target: Path, options: ModelOptions) -> bool:
    """Return whether each token of a draft model is that of the target with the same id.

    options: of the target. Raises UnsupportedModelError where that cannot be determined.
    """
    shared = DraftVocabulary.between(draft, target, options).shared
    if shared is None:
        return True
    ids, mapped = np.arange(len(shared.draft_to_target)), shared.draft_to_target
    return shared.has_equal_ids and bool(((mapped == ids) | (mapped < 0)).all())


def _require_same_tokens(
    draft: Path, target: Path, options: ModelOptions, name: str | None
) -> None:
    if not has_same_tokens(draft, target, options):
        limit = "a model with the target's tokens; method draft_model takes others"
        raise InvalidValueError("speculative_config.model", name, limit)


def _resolve_head(
    method: HeadMethodConfig,
    target: Path,
    model: ModelConfig,
    options: ModelOptions,
    progress: Progress,
) -> Path:
    """Find or download a head of a model, and report what its files were taken for.

    Heads that come with this package are not reported: their format is known.
    """
    directory = target
    if method.model is not None:
        directory = resolve(method.model, progress=progress, may_be_pickled=True)
    keys = method.window, method.speculative_token_map, method.name
    head = HeadConfig.from_directory(directory, model, *keys)
    if (own := head.shape.whole_model) is not None:
        require_loadable(directory, own)
        _require_same_tokens(directory, target, options, method.model)
    if head.method != method.name:
        limit = f"{head.method}: {directory} is {head.describe()[0]}"
        raise InvalidValueError("speculative_config.method", method.name, limit)
    if method.model in TARGETS_OF_DRAFTERS:
        return directory
    for line in head.describe():
        progress(f"head {method.model or method.name}: {line}")
    return directory
