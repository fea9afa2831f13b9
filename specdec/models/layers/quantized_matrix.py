"""Linear layers whose weights stay in few bits on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.packed_weight import PackedWeight


class QuantizedMatrix:
    """Matrix of Triton's kernels, with the codes of a checkpoint or of quantization at loading.

    Few rows are multiplied by the codes, more by the dequantized weight, which takes memory
    for the time of the product. Weights of 8-bit floats are multiplied by rows of 8-bit floats,
    each quantized alone, on GPUs that can.
    """

    def __init__(self, weight: PackedWeight, *, is_invariant: bool) -> None:
        """weight: on its device. is_invariant: whether a row has the same bits in any batch."""
        from specdec.kernels.triton import packed  # imports Triton

        self.weight = weight
        self._is_invariant = is_invariant
        has_products = packed.has_float8_products(weight.codes.device)
        self._multiplies_float8 = has_products and packed.fits_float8_products(weight)

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._product(x, None)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._product(x, base)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        size = (len(x), self.weight.shape[0])
        return self._product(x, None, x.new_empty(size, dtype=torch.float32))

    def _product(self, x: Tensor, base: Tensor | None, output: Tensor | None = None) -> Tensor:
        from specdec.kernels.triton import packed as kernels

        order = self.weight.order
        if order is not None:
            x = x.index_select(1, order)
        rows = x if x.stride(1) == 1 else x.contiguous()
        if self._multiplies_float8:
            return kernels.multiply_float8(rows, self.weight, base, output)
        if self._is_invariant or len(x) <= kernels.MOST_FEW_ROWS[self.weight.kind]:
            return kernels.multiply(rows, self.weight, base, output)
        return self._dense_product(rows, base, output)

    def _dense_product(self, x: Tensor, base: Tensor | None, output: Tensor | None) -> Tensor:
        from specdec.kernels.triton.packed import dequantize

        weight = dequantize(self.weight, x.dtype).t()
        if base is not None:
            return torch.addmm(base, x, weight)
        if output is None:
            return x @ weight
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight, out_dtype=torch.float32)
        return output.copy_(x.float() @ weight.float())
