// The stage between a layer's projection to heads and its attention.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/elementwise.h"
#include "base/simd_math.h"
#include "decoder/decoder.h"
#include "threads/thread_team.h"

namespace specdec {

// Tokens per task that processes one head: their keys share few cache lines, and the head's
// projections are still in the cache.
constexpr int64_t kTokensPerHeadTask = 32;

// Return a layer's KV in the cache and in the extra blocks.
inline KvLayer kv_of_layer(const Decoder& model, const KvCache& cache, const ExtraKv& extra,
                           int64_t block_size, int64_t layer) {
  KvLayer kv = {cache.data, cache.format,   model.num_kv_heads, cache.num_blocks,
                block_size, model.head_dim, extra.data,         extra.num_blocks,
                model.latent.rank};
  kv.data += layer * kv.num_bytes();
  kv.extra_data += layer * kv.num_extra_bytes();
  return kv;
}

// A token's position in its sequence, and the slot of its KV.
struct TokenSlot {
  int64_t position, slot;
};

inline std::vector<TokenSlot> token_slots(const Batch& batch) {
  std::vector<TokenSlot> slots;
  slots.reserve(batch.num_tokens);
  for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
    const int64_t end = batch.context_lens[sequence], base = batch.base_of(sequence);
    const int64_t count = batch.query_starts[sequence + 1] - batch.query_starts[sequence];
    for (int64_t index = end - count; index < end; ++index) {
      const int64_t token = slots.size();
      const int64_t position = index <= base ? index : base + batch.depth_of(token);
      slots.push_back({position, batch.slot(sequence, index)});
    }
  }
  return slots;
}

// Normalizes and rotates queries and keys, and writes keys and values to the KV cache. The heads of
// a layer are numbered in the order of its projection: query, key, value heads.
class RopeAndCache {
 public:
  RopeAndCache(const Decoder& model, const Batch& batch)
      : model_(model), token_slots_(token_slots(batch)) {}

  // Run a stage over some heads of all tokens. projected: of these heads, [num_tokens, heads,
  // head_dim]. squares: where one norm covers all heads, the sums of squares of each token's
  // queries and of its keys over all ranks, [num_tokens, 2]; else null. Tasks of few tokens and one
  // head: a thread then has most of the heads that it computed, and the keys share cache lines.
  void run(const Layer& layer, const KvLayer& kv, Range heads, float* projected, int64_t stride,
           const float* squares, ThreadTeam team) const {
    const int64_t num_tokens = token_slots_.size(), num_heads = heads.end - heads.begin;
    const int64_t num_chunks = ceil_div(num_tokens, kTokensPerHeadTask);
    team.parallel_for(num_chunks * num_heads, [&](int64_t index) {
      const int64_t own = index % num_heads;
      const Range tokens = ThreadTeam{index / num_heads, num_chunks}.share(num_tokens);
      for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        run_head(layer, kv, token, heads.begin + own, squares ? squares + 2 * token : nullptr,
                 projected + token * stride + own * model_.head_dim);
      }
    });
  }

  int64_t slot(int64_t token) const { return token_slots_[token].slot; }

  // Rotate the first dimensions of a head of a token in place.
  void rotate(const Layer& layer, int64_t token, float* values) const {
    if (!layer.cos) return;
    const int64_t first = token_slots_[token].position * (model_.rotary_dim / 2);
    apply_rotary(values, layer.cos + first, layer.sin + first, model_.rotary_dim);
  }

  // Multiply a query of a token by the factor of its position, if the layer has factors.
  void scale_query(const Layer& layer, int64_t token, float* values) const {
    if (!layer.query_scales) return;
    scale(values, layer.query_scales[token_slots_[token].position], model_.head_dim);
  }

 private:
  const Decoder& model_;
  std::vector<TokenSlot> token_slots_;  // [num_tokens]

  void run_head(const Layer& layer, const KvLayer& kv, int64_t token, int64_t head,
                const float* squares, float* values) const {
    const int64_t kv_head = head - model_.num_heads;
    if (kv_head >= model_.num_kv_heads) {
      kv.write_value(kv_head - model_.num_kv_heads, slot(token), values);
      return;
    }
    if (model_.traits.rotates_before_norms) {
      rotate(layer, token, values);
      normalize(layer, head, squares, values);
    } else {
      normalize(layer, head, squares, values);
      rotate(layer, token, values);
    }
    if (kv_head >= 0) return kv.write_key(kv_head, slot(token), values);
    scale_query(layer, token, values);
  }

  // Normalize a query or key head, where the layer has norms of heads.
  void normalize(const Layer& layer, int64_t head, const float* squares, float* values) const {
    const bool is_key = head >= model_.num_heads;
    const float* weight = is_key ? layer.key_norm : layer.query_norm;
    if (!weight) return;
    const int64_t dim = model_.head_dim;
    if (model_.traits.qk_norm != QkNorm::kHead) {
      weight += (is_key ? head - model_.num_heads : head) * dim;
    }
    if (squares) {
      const int64_t num_heads = is_key ? model_.num_model_kv_heads : model_.num_model_heads;
      const float mean = squares[is_key] / float(num_heads * dim);
      scale_by_weight(values, 1.0f / std::sqrt(mean + model_.norm_eps), weight, dim);
    } else if (model_.traits.norm == NormKind::kLayer) {
      layer_norm(values, weight, nullptr, model_.norm_eps, dim, values);
    } else {
      rms_norm(values, weight, model_.norm_eps, dim, values);
    }
  }
};

}  // namespace specdec
