"""Checks of the files that a configuration names, before anything is measured or started.

A rank, which loads them later, would raise the same errors after a minute. Headers of weights,
shapes of adapters and the tokenizer are read here, no weights.
"""

from __future__ import annotations

from specdec.config.llm import LLMConfig
from specdec.engine.models.checkpoint_lint import require_loadable
from specdec.engine.models.model_limits import draft_adapter_fault, require_draft_adapters
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.models.config.decoder_tensors import linear_layers
from specdec.models.config.model_config import ModelConfig
from specdec.models.hub import Progress
from specdec.models.lora.peft import AdapterFiles
from specdec.models.resolve import resolve, resolve_adapter
from specdec.text.tokenizer import check_tokenizer


def check_target(config: LLMConfig, progress: Progress) -> ModelDirectories:
    """Check the files of the target and of its adapters; return its directory, and no other.

    Raises ModelNotFoundError, and UnsupportedModelError for files that a rank would not load.
    """
    options = config.model_options
    directory = resolve(config.model, progress=progress)
    model = ModelConfig.from_directory(directory, options)
    check_tokenizer(directory)
    require_loadable(directory, model)
    for order in config.startup_adapters:
        if order.path:
            files = _read_adapter(config, order.path, progress)
            if model.transformers is None:
                files.require_modules(linear_layers(model))
    return ModelDirectories(directory, None, None, options)


def check_draft_model(config: LLMConfig, directories: ModelDirectories, progress: Progress) -> None:
    """Check the files of a draft model, if there is one, and of the counterparts of adapters.

    Those of a head are checked where they are resolved. Raises as `check_target` does, and
    InvalidValueError for a counterpart that no drafter takes.
    """
    directory = directories.draft
    if directory is not None and directory != directories.target:
        require_loadable(directory, ModelConfig.from_directory(directory))
    paths = [order.draft_path for order in config.startup_adapters if order.draft_path]
    if not paths:
        return
    models = directories.configs()
    fault = draft_adapter_fault(config, models.draft)
    for path in paths:
        require_draft_adapters(path, fault)
        files = _read_adapter(config, path, progress)
        if models.draft is not None:
            files.require_modules(linear_layers(models.draft))
        elif models.head is not None:
            files.require_modules(models.head.adapted_layers(), "draft head's layers")


def _read_adapter(config: LLMConfig, path: str, progress: Progress) -> AdapterFiles:
    limits = config.adapter_limits
    assert limits is not None, "adapters to load where none are enabled"
    return AdapterFiles.read(resolve_adapter(path, progress), limits.max_rank)
