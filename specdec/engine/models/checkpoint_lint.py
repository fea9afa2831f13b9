"""Lines about the files of a model: what is not used or assumed, and why it does not load.

The checks are those of a rank that loads. They read the headers of the weight files, and of a GPTQ
checkpoint the zero points of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.models.config.config_files import decoder_of, read_json, supported_architecture
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.families.fixed_values import fixed_keys
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checks import CheckpointFindings, Layout, check_tensors
from specdec.models.weights.quantization_config import described_by, with_quantization
from specdec.models.weights.tensor_headers import text_model_headers
from specdec.models.weights.weight_files import (
    SAFETENSORS,
    find_weight_files,
    read_headers,
    safetensors_files,
)
from specdec.types.errors import UnsupportedModelError

_GPT_OSS = "gpt_oss"

_KEYS_WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path", "auto_map"),
        *("dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp", "id2label"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "label2id"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "is_decoder"),
        *("router_jitter_noise", "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha"),
        *("seq_aux", "chunk_size_feed_forward", "return_dict", "problem_type"),
        *("use_mamba_kernels", "mamba_chunk_size", "chunk_size", "mamba_ssm_cache_dtype"),
        *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        *("linear_dt_init_floor", "num_logits_to_keep", "z_loss_coefficient"),
    )
)
"""Keys of a config.json that change nothing in a forward pass here or in transformers."""

_OFF: tuple[object, ...] = (None, False, "", [], {})
"""Values of a key that is switched off."""


@dataclass(frozen=True)
class CheckpointLint:
    """Lines about the files of a model.

    faults: why it does not load. notes: what is assumed, or not used.
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def lint_checkpoint(directory: Path, config: ModelConfig) -> CheckpointLint:
    """Check the files of a model. config: as read from the directory."""
    raw = with_quantization(directory, read_json(directory / "config.json") or {})
    faults, notes = list[str](), list[str]()
    if config.transformers is None:
        notes += _key_notes(raw)
    try:
        notes += _file_notes(directory)
        if config.transformers is None:
            found, layout = _findings(directory, raw, config)
            faults += found.faults
            notes += _tensor_notes(directory, raw, config, found)
            if not found.faults:
                notes += _version_notes(directory, layout, config)
    except UnsupportedModelError as error:
        faults.append(str(error))
    return CheckpointLint(tuple(faults), tuple(notes))


def require_loadable(directory: Path, config: ModelConfig) -> None:
    """Raise UnsupportedModelError for the files of a model that a rank would not load."""
    if config.transformers is None:  # otherwise `config` was read from the headers of the weights
        raw = with_quantization(directory, read_json(directory / "config.json") or {})
        _findings(directory, raw, config)[0].require()


def _findings(
    directory: Path, raw: Mapping[str, Any], config: ModelConfig
) -> tuple[CheckpointFindings, Layout | None]:
    layout: Layout | None = None
    if raw.get("quantization_config") is not None or raw.get("model_type") == _GPT_OSS:
        from specdec.models.weights.checkpoint import (
            stored_format,  # imports torch, which few checkpoints need
        )

        layout = stored_format(directory)
    headers = text_model_headers(read_headers(safetensors_files(directory)))
    return check_tensors(headers, layout, decoder_tensors(config, headers)), layout


def _tensor_notes(
    directory: Path, raw: Mapping[str, Any], config: ModelConfig, found: CheckpointFindings
) -> Iterator[str]:
    if (quantization := raw.get("quantization_config")) is not None:
        source = described_by(directory, read_json(directory / "config.json") or {})
        method = quantization.get("quant_method")
        yield f"{found.num_quantized} tensors are quantized: {method}, described by {source}"
    fields = decoder_of(supported_architecture(raw), raw)[2]
    if fields.get("tie_word_embeddings") and not config.tie_word_embeddings:
        yield "the stored output head is used: it differs from the embedding that is tied to it"
    elif config.tie_word_embeddings:
        yield "the output head is the embedding (tie_word_embeddings)"
    if found.unused:
        yield f"nothing reads {found.unused}"
    if found.known_unused:
        yield f"not used: {found.known_unused}"


def _version_notes(directory: Path, layout: Layout | None, config: ModelConfig) -> Iterator[str]:
    """Yield a note if the zero points of a GPTQ checkpoint are not of the version that it names."""
    if layout is None:
        return
    from specdec.models.weights.awq_gptq import OTHER_VERSION, Gptq
    from specdec.models.weights.stored_tensors import StoredTensors

    if isinstance(layout, Gptq):
        tensors = StoredTensors(find_weight_files(directory), directory)
        held = (name for name in decoder_tensors(config, tensors) if layout.holds(tensors, name))
        if (first := next(held, None)) and layout.has_other_version(tensors, first):
            yield OTHER_VERSION


def _file_notes(directory: Path) -> Iterator[str]:
    """Yield a note on weight files beside those that are read."""
    others = {*directory.glob(f"*{SAFETENSORS}")} - {*find_weight_files(directory)}
    if others:
        yield f"files that nothing reads: {', '.join(sorted(each.name for each in others))[:300]}"


@dataclass
class _RecordedKeys(Mapping[str, Any]):
    """The keys of a config.json, with a record of those that were read."""

    fields: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def _key_notes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the keys of config.json that nothing reads, and on missing ones."""
    whole = supported_architecture(raw)
    architecture, family, fields = decoder_of(whole, raw)
    recorded = _RecordedKeys(fields)
    ModelConfig.from_fields(whole, (architecture, family, recorded), {})
    given = raw if fields.keys() >= raw.keys() else raw.get("text_config") or raw
    fixed = fixed_keys(architecture)
    unread = sorted(
        key
        for key, value in given.items()
        if key not in recorded.read | _KEYS_WITHOUT_EFFECT | fixed
        and not key.startswith("_")
        and value not in _OFF
    )
    if unread:
        yield f"keys of config.json that nothing reads: {', '.join(unread)}"
    assumed = {
        key: value
        for key, value in family.config_defaults.items()
        if key not in given and key in recorded.read and value is not None
    }
    if assumed:
        values = ", ".join(f"{key} {value}" for key, value in assumed.items())
        yield f"assumed, because config.json lacks them: {values}"
