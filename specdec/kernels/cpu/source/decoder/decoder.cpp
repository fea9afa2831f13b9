// Entry points of a decoder's forward pass.
#include "decoder/decoder.h"

#include "decoder/forward_pass.h"

// Return the bytes of workspace that the forward pass of a batch needs.
SPECDEC_EXPORT int64_t specdec_decoder_memory_bytes(const specdec::Decoder* model,
                                                    const specdec::Batch* batch,
                                                    int32_t num_threads) {
  return specdec::ForwardPass(*model, *batch, {}, nullptr, num_threads).memory_bytes();
}

// Write the batch's KV to the cache, its hidden states to hidden [num_tokens, hidden_size] and the
// tapped residual streams to `taps`, which may be null.
// Return kNeedsMemory without effect when memory_bytes is less than specdec_decoder_memory_bytes.
SPECDEC_EXPORT specdec::PassResult specdec_decoder_forward(const specdec::Decoder* model,
                                                           const specdec::Batch* batch,
                                                           const specdec::KvCache* cache,
                                                           void* memory, int64_t memory_bytes,
                                                           const specdec::Taps* taps,
                                                           float* hidden, int32_t num_threads) {
  specdec::ForwardPass pass(*model, *batch, *cache, memory, num_threads, {}, taps);
  if (pass.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) {
    pass.embed(team);
    pass.run_layers(nullptr, team);
    pass.write_hidden(hidden, team);
  });
  return pass.has_failed() ? specdec::PassResult::kPeerLost : specdec::PassResult::kDone;
}
