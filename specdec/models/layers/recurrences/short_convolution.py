"""The short convolution of LFM2 (arXiv 2511.23404, section 2) in torch."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.reference.recurrent.recurrence import LayerStates
from specdec.models.config.recurrent import ShortConvolution
from specdec.models.layers.linear import weight_parts
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer


class ShortConvolutionLayer(RecurrentLayer):
    """Convolution of this rank's channels, multiplied by a gate before it and by one after it."""

    def __init__(self, config: ShortConvolution, source: LayerSource) -> None:
        """Read the weights of own channels."""
        super().__init__(source)
        own, count, has_bias = source.own, config.num_channels, config.has_bias
        parts = weight_parts(source.prefix, ("in_proj",), [count] * 3, [own] * 3, has_bias=has_bias)
        self.in_proj = source.input_projection(parts)
        shape = (count, config.kernel_size)
        self.convolution = source.convolution(
            "conv", shape, [own], has_bias=has_bias, activates=False
        )
        self.out_proj = source.output_projection("out_proj", count, own, has_bias=has_bias)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrentLayer."""
        gate, output_gate, values = self.in_proj(x).chunk(3, -1)
        mixed = self.kernels.convolve(gate * values, self.convolution, states)
        gated: Tensor = output_gate * states.plan.of_tokens(mixed).to(x.dtype)
        return gated
