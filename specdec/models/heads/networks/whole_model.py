"""A draft model as a head: a pair is a token, and there is no feature beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.heads.formats.whole_model import WholeModelShape
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.recurrent import PassHead
from specdec.models.heads.networks.target import TargetRank
from specdec.models.llama import CausalDecoder
from specdec.models.lora.updates import AdapterStore
from specdec.models.weights.checkpoint import CheckpointReader, open_checkpoint


class WholeModelHead(PassHead):
    """One rank of a draft model that the target's ranks share, a DraftHead."""

    taps = ()
    feature_size = 0
    max_draft_tokens = None
    reads_drafts = True

    def __init__(self, decoder: CausalDecoder | NativeDecoder, target_vocab_size: int) -> None:
        """Draft with a decoder. Its tokens are the first ones of the target."""
        self.decoder, self._target_vocab_size = decoder, target_vocab_size
        own = decoder.torch_decoder if isinstance(decoder, NativeDecoder) else decoder
        self.num_kv_layers = own.config.num_attention_layers
        self.vocab_size, self.vocab_slice = own.config.vocab_size, own.vocab_slice
        self.output_size = own.config.hidden_size
        self.target_ids: Tensor | None = None
        if self.vocab_size < target_vocab_size:
            self.target_ids = torch.arange(self.vocab_size, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def capabilities(self) -> HeadCapabilities:
        """See DraftHead."""
        if isinstance(self.decoder, NativeDecoder):
            return HeadCapabilities(runs_nodes=True, drafts_whole=self.decoder.can_draft)
        fits_graphs = self.decoder.fits_graphs
        return HeadCapabilities(
            runs_nodes=True, on_device=DeviceDrafts.PAIRS, fits_graphs=fits_graphs
        )

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See DraftHead."""
        return self.decoder.new_kv_cache(num_slots)

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """See DraftHead."""
        del dtype  # the decoder's
        return self.decoder.enable_adapters()

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        del runs
        return states[:, :0]

    def next_features(self, output: Tensor) -> Tensor:
        """See DeviceHead."""
        return output[:, :0]

    def run_pairs(self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """See PassHead."""
        del features
        return self.decoder.forward(self._in_vocabulary(pairs), kv_cache)

    @torch.inference_mode()
    def output_logits(self, output: Tensor) -> Tensor:
        """See DeviceHead."""
        return self.decoder.compute_logits(output)

    def run_on_device(self, batch: AnyDeviceBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """See DeviceHead."""
        del features
        assert isinstance(self.decoder, CausalDecoder), "a device has no native kernels"
        if self.target_ids is not None:
            batch = replace(batch, input_ids=batch.input_ids.clamp_max(self.vocab_size - 1))
        return self.decoder.forward_on_device(batch, kv_cache)

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """See WholeDraftHead."""
        assert isinstance(self.decoder, NativeDecoder), "kernels draft whole drafts"
        pairs = self._in_vocabulary(inputs.pairs)
        return self.decoder.draft(pairs, inputs.kv_cache, counts, params)

    def on_native_kernels(self) -> WholeModelHead:
        """Return the draft model on the kernels for CPUs."""
        assert isinstance(self.decoder, CausalDecoder), "it is on them"
        return WholeModelHead(NativeDecoder(self.decoder), self._target_vocab_size)

    def _in_vocabulary(self, pairs: ForwardBatch) -> ForwardBatch:
        """Return pairs whose tokens it has; the last one stands for those of the target alone."""
        last = self.vocab_size - 1
        if self.target_ids is None or int(pairs.input_ids.max()) <= last:
            return pairs
        chunks = [
            chunk._replace(token_ids=[min(each, last) for each in chunk.token_ids])
            for chunk in pairs.chunks
        ]
        return ForwardBatch(chunks, pairs.block_size)


def read_whole_model(
    shape: WholeModelShape, reader: CheckpointReader, target: TargetRank
) -> WholeModelHead:
    """Load this rank's shard of a draft model, whatever the layout of its files."""
    tensors = open_checkpoint(
        shape.directory, target.dtype, reader.quantization, target.device, target.backend
    )
    # Positions beyond those that it was trained for: its drafts there are only less likely.
    longest = max(shape.decoder.max_position_embeddings, target.max_positions)
    config = replace(shape.decoder, max_position_embeddings=longest)
    sizes = (target.max_positions, target.block_size)
    decoder = CausalDecoder(config, tensors, target.group, *sizes, shape.output_tokens)
    return WholeModelHead(decoder, target.config.vocab_size)
