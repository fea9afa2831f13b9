// Moves of KV between slots: after verification, the accepted path of a tree of drafts becomes the
// end of its sequence.
#include <cstring>

#include "decoder/rope_and_cache.h"
#include "threads/thread_team.h"

namespace specdec {

namespace {

// Copy the KV of a token.
void move_token(const KvLayer& kv, int64_t head, int64_t source, int64_t target) {
  const int64_t bytes = element_bytes(kv.format), size = kv.block_size, dim = kv.head_dim;
  if (kv.is_latent()) {
    std::memcpy(kv.keys(head, target / size) + target % size * dim * bytes,
                kv.keys(head, source / size) + source % size * dim * bytes, dim * bytes);
    return;
  }
  const char* from_keys = kv.keys(head, source / size) + source % size * bytes;
  char* to_keys = kv.keys(head, target / size) + target % size * bytes;
  for (int64_t d = 0; d < dim; ++d) {
    std::memcpy(to_keys + d * size * bytes, from_keys + d * size * bytes, bytes);
  }
  std::memcpy(kv.values(head, target / size) + target % size * dim * bytes,
              kv.values(head, source / size) + source % size * dim * bytes, dim * bytes);
}

}  // namespace

}  // namespace specdec

// Copy the KV of tokens in all layers; slots: [count, 2], source and target of each move, in order.
SPECDEC_EXPORT void specdec_move_kv(const specdec::Decoder* model, const specdec::KvCache* cache,
                                    int64_t block_size, const int32_t* slots, int64_t count) {
  specdec::KvLayer kv = specdec::kv_of_layer(*model, *cache, {}, block_size, 0);
  for (int64_t layer = 0; layer < model->num_kv_layers(); ++layer, kv.data += kv.num_bytes()) {
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
      for (int64_t move = 0; move < count; ++move) {
        specdec::move_token(kv, head, slots[2 * move], slots[2 * move + 1]);
      }
    }
  }
}
