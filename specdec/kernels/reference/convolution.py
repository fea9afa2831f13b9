"""Causal convolution of each channel over the last few inputs of a sequence."""

from __future__ import annotations

from torch import Tensor


def causal_convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution at each input that has kernel_size - 1 before it, in float32.

    Row i of the result is of input i + kernel_size - 1. Each is a sum of products in the order of
    the inputs, so that it has the same bits in any batch.

    inputs: [N, channels]; weight: [channels, kernel_size], the last one for the input itself;
    bias: [channels].
    """
    size = weight.shape[1]
    num_outputs, taps = len(inputs) - size + 1, weight.float().t()
    values = inputs.float()
    found = values[:num_outputs] * taps[0]
    for place in range(1, size):
        found.addcmul_(values[place : place + num_outputs], taps[place])
    return found if bias is None else found.add_(bias.float())
