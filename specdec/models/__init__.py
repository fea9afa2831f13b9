"""Models, and where their files come from."""

from specdec.models.decoder import CausalDecoder
from specdec.models.loading import Decoder, load_model

__all__ = ["CausalDecoder", "Decoder", "load_model"]
