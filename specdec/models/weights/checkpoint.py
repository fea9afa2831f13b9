"""Reading of slices of tensors from a directory of safetensors files."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.packed_weight import PackedWeight
from specdec.models.weights.checks import stored_parts
from specdec.models.weights.dequantize import WeightFormat, weight_format
from specdec.models.weights.gpt_oss import GptOssExperts, is_mxfp4
from specdec.models.weights.packed_slices import has_packed_kernels, read_packed
from specdec.models.weights.quantization_config import read_quantization
from specdec.models.weights.stored_tensors import SHORT_DTYPES, StoredTensors, TensorSource
from specdec.models.weights.weight_files import safetensors_files
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass
class CheckpointReader:
    """Reader of slices of a checkpoint's tensors, dequantized, in `dtype`, on `device`.

    quantization, backend: format and kernels of the matrices that linear layers make.
    weight_format: layout of the quantized weights in `tensors`, if there are any.
    num_elements_read: number of elements read so far, for tests of sharding.
    """

    tensors: TensorSource
    dtype: torch.dtype
    quantization: QuantizationMethod | None
    weight_format: WeightFormat | None
    device: torch.device = CPU
    backend: KernelBackend = KernelBackend.TORCH
    num_elements_read: int = 0

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        cols: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read rows and columns of a tensor whose whole shape must be `shape`.

        dtype: of the result, instead of the reader's; see `exact_dtype`.

        Raises UnsupportedModelError if the tensor is missing or has another shape, or has codes
        that the layout of the weights does not describe.
        """
        stored_parts(self.tensors, self.weight_format, name, shape)
        packed = self._packed_as(name)
        if packed is not None and (found := packed.shape(self.tensors, name)) != shape:
            raise UnsupportedModelError(f"{name} has shape {list(found)}; expected {list(shape)}")
        window = [
            part if part is not None else range(size)
            for part, size in zip((rows, cols), shape, strict=False)
        ]
        tensor = (
            packed.read(self.tensors, name, *window)
            if packed
            else self.tensors.slice(name, *(slice(part.start, part.stop) for part in window))
        ).to(device=self.device, dtype=dtype or self.dtype)
        self.num_elements_read += tensor.numel()
        # A vector may be used without a copy, which would keep the whole file mapped.
        return tensor.clone() if len(shape) == 1 else tensor

    def read_packed(
        self, name: str, shape: tuple[int, int], rows: range, cols: range
    ) -> PackedWeight | None:
        """Read rows and columns of a weight as the files have them, on the device.

        None where it is not quantized, or stored in a way that no kernel of the backend reads: then
        `read` dequantizes it. Raises UnsupportedModelError for another shape.
        """
        layout = self._packed_as(name)
        if layout is None or not self.keeps_packed:
            return None
        stored_parts(self.tensors, layout, name, shape)
        found = read_packed(layout, self.tensors, name, rows, cols)
        if found is None:
            logger.warning("%s is dequantized: its layout has no kernel, or the rank's part", name)
            return None
        self.num_elements_read += len(rows) * len(cols)
        return found.to(self.device)

    @property
    def keeps_packed(self) -> bool:
        """Return whether quantized weights stay in few bits, for Triton's kernels."""
        return self.backend.is_triton and self.quantization is None

    def exact_dtype(self, *names: str) -> torch.dtype:
        """Return the shortest dtype that represents the values of these tensors exactly.

        That is the stored dtype if `dtype` is float32 and all are stored in the same 16-bit dtype,
        else `dtype`.
        """
        stored = {self._short_dtype(each) for each in names}
        common = stored.pop() if len(stored) == 1 else None
        return common if common is not None and self.dtype == torch.float32 else self.dtype

    def _short_dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a tensor if it is a 16-bit floating-point type, else None."""
        layout = self._packed_as(name)
        if isinstance(layout, GptOssExperts):
            return layout.short_dtype(self.tensors, name)
        return None if layout else SHORT_DTYPES.get(self.tensors.dtype(name))

    def _packed_as(self, name: str) -> WeightFormat | None:
        """Return the format of a quantized weight; None for another tensor."""
        layout = self.weight_format
        return layout if layout and layout.holds(self.tensors, name) else None


def open_checkpoint(
    directory: Path,
    dtype: torch.dtype,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    backend: KernelBackend = KernelBackend.TORCH,
) -> CheckpointReader:
    """Open the model.safetensors of a directory, or the files of its index.

    Raises UnsupportedModelError for files that cannot be read, and InvalidValueError for a
    quantization that does not exist or that this processor does not support.
    """
    require_quantization(quantization)
    layout = stored_format(directory)
    stored = StoredTensors(safetensors_files(directory), directory)
    if layout is not None:
        is_kept = backend.is_triton and quantization is None and has_packed_kernels(layout)
        is_plain = layout == GptOssExperts() and not any(map(is_mxfp4, stored))
        if not is_kept and not is_plain:
            _log_dequantization(directory)
    return CheckpointReader(stored, dtype, quantization, layout, device, backend)


def stored_format(directory: Path) -> WeightFormat | None:
    """Return the layout of the quantized weights in a directory; None without any.

    Raises UnsupportedModelError for one that cannot be read.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    layout = weight_format(read_quantization(directory, config))
    if layout is None and config.get("model_type") == "gpt_oss":
        return GptOssExperts()
    return layout


def _log_dequantization(directory: Path) -> None:
    logger.warning(
        "quantized weights in %s are dequantized during loading: memory and speed are "
        "those of the dtype of the service",
        directory,
    )
