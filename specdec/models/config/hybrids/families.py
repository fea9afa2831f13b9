"""The architectures with recurrent layers by the name that config.json has for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.models.config.architecture import Architecture
from specdec.models.config.hybrids.convolutions import LFM2, LFM2_MOE
from specdec.models.config.hybrids.delta_rules import (
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from specdec.models.config.hybrids.jamba import JAMBA
from specdec.models.config.hybrids.kimi import KIMI_LINEAR
from specdec.models.config.hybrids.nemotron import NEMOTRON_H
from specdec.models.config.hybrids.state_spaces import BAMBA, FALCON_H1, GRANITE_HYBRID

HYBRIDS: Mapping[str, Architecture] = MappingProxyType(
    {
        "Lfm2ForCausalLM": LFM2,
        "Lfm2MoeForCausalLM": LFM2_MOE,
        "Qwen3NextForCausalLM": QWEN3_NEXT,
        "Qwen3_5ForCausalLM": QWEN3_5,
        "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
        "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
        "NemotronHForCausalLM": NEMOTRON_H,
        "FalconH1ForCausalLM": FALCON_H1,
        "BambaForCausalLM": BAMBA,
        "JambaForCausalLM": JAMBA,
        "OlmoHybridForCausalLM": OLMO_HYBRID,
        "KimiLinearForCausalLM": KIMI_LINEAR,
    }
)
