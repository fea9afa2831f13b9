"""Causal convolution of each channel over the last few inputs of a sequence."""

from __future__ import annotations

from torch import Tensor


def causal_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, taps: Tensor | None = None
) -> Tensor:
    """Return the convolution at each input that has kernel_size - 1 before it, in float32.

    Row i of the result is of input i + kernel_size - 1. Each is a sum of products in the order of
    the inputs, so that it has the same bits in any batch.

    inputs: [N, channels]; weight: [channels, kernel_size], the last one for the input itself;
    bias: [channels]. taps: as in StatePlan, which has trees; None for the inputs in order.
    """
    size, values = weight.shape[1], inputs.float()
    num_outputs, weights = len(inputs) - size + 1, weight.float().t()

    def at(place: int) -> Tensor:
        return values[place : place + num_outputs] if taps is None else values[taps[place]]

    found = at(0) * weights[0]
    for place in range(1, size):
        found.addcmul_(at(place), weights[place])
    return found if bias is None else found.add_(bias.float())
