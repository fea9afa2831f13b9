// Entry point of a decoder's forward pass.
#include "decoder/decoder.h"

#include "decoder/forward_pass.h"

// Write the batch's KV to the cache, its hidden states to hidden [num_tokens, hidden_size] and the
// tapped residual streams to `taps`, which may be null.
SPECDEC_EXPORT specdec::PassResult specdec_decoder_forward(
    specdec::Workspace* workspace, const specdec::Decoder* model, const specdec::Batch* batch,
    const specdec::KvCache* cache, const specdec::Taps* taps, float* hidden, int32_t num_threads) {
  specdec::ForwardPass pass(*model, *batch, *cache, workspace->memory, num_threads, {}, taps);
  return specdec::run_pass(workspace, pass, num_threads, [&](specdec::ThreadTeam team) {
    pass.embed(team);
    pass.run_layers(nullptr, team);
    pass.write_hidden(hidden, team);
  });
}
