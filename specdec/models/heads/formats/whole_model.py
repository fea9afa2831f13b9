"""A whole model of the target's vocabulary, which drafts on the target's ranks from tokens alone.

Any checkpoint of a decoder that could be a target, so the configuration names the method. The
loader of models knows its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec.models.config.model_config import ModelConfig
from specdec.models.drafters.token_map import token_map_of
from specdec.models.heads.formats.shape import HeadFormat, HeadShape, Reading
from specdec.models.heads.formats.source import HeadSource, Shape
from specdec.models.weights.tensor_headers import text_name
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class WholeModelShape(HeadShape):
    """Sizes of a draft model.

    output_tokens: those that it may draft, ascending; None for all.
    """

    decoder: ModelConfig
    directory: Path
    output_tokens: tuple[int, ...] | None = None

    @property
    def feature_size(self) -> int:
        """0: it reads no state of the target."""
        return 0

    @property
    def whole_model(self) -> ModelConfig:
        """See HeadShape."""
        return self.decoder

    def tensors(self) -> dict[str, Shape]:
        """Return none: the loader of models knows more layouts than one."""
        return {}

    def summary(self) -> str:
        """See HeadShape."""
        decoder = self.decoder
        return f"{decoder.architecture}, {decoder.num_layers} layers of {decoder.hidden_size}"


def read_whole_model(source: HeadSource, target: ModelConfig) -> Reading:
    """Read a draft model. Raises UnsupportedModelError for one that needs a draft worker."""
    decoder = ModelConfig.from_directory(source.directory)
    if (fault := fault_of_model(decoder, target)) is not None:
        reason = f"{source.directory} cannot draft on the target's ranks: {fault}"
        raise UnsupportedModelError(f"{reason}; use method draft_model")
    tokens = token_map_of(source.directory, None, decoder.vocab_size)
    shape = WholeModelShape(
        draft_vocab_size=decoder.vocab_size,
        decoder=decoder,
        directory=source.directory,
        output_tokens=tokens,
    )
    return Reading("a draft model", shape, source.renamed(text_name), ignored=_is_model)


def fault_of_model(decoder: ModelConfig, target: ModelConfig) -> str | None:
    """Return why a draft model needs a worker, by its sizes and layers; None where it does not."""
    if decoder.transformers is not None:
        return f"transformers' code runs {decoder.architecture}"
    if decoder.recurrent is not None:
        return f"{decoder.architecture} has recurrent layers"
    if decoder.varied is not None or decoder.traits.attention_chunk is not None:
        return f"{decoder.architecture} has layers of several shapes, or chunks of attention"
    if decoder.latent is not None and decoder.latent.indexer is not None:
        return f"queries of {decoder.architecture} attend to chosen tokens"
    if decoder.vocab_size > target.vocab_size:
        sizes = f"{decoder.vocab_size} tokens, the target's {target.vocab_size}"
        return f"its vocabulary has {sizes}"
    return None


def _is_model(name: str) -> bool:
    return True


def _is_head(source: HeadSource) -> bool:
    return False


WHOLE_MODEL = HeadFormat(read_whole_model, _is_head)
