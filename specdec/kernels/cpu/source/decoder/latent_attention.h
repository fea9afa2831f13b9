// The products of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in the
// absorbed form: what expands a latent to the keys of a head is applied to its query instead, and
// what expands it to values to the result of attention.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/elementwise.h"
#include "decoder/decoder.h"
#include "decoder/lora_pass.h"
#include "decoder/rope_and_cache.h"
#include "gemm/gemm_float.h"

namespace specdec {

// Of the norms of latents, whatever the norms of hidden states have.
constexpr float kLatentNormEps = 1e-6f;

// Turns a layer's projection into the queries of attention and the key that all heads share, and
// its result into values. All threads of a team call it; each operation works on one row.
//
// The projection of a token is a query, or a latent of one, then the key: first the dimensions that
// are rotated, then the latent. A head's query has its rotated dimensions first too.
class LatentAttention {
 public:
  // Takes no memory where the model has no latents.
  LatentAttention(const Decoder& model, const RopeAndCache& rope_and_cache, int64_t num_tokens,
                  Arena& arena)
      : model_(model), rope_and_cache_(rope_and_cache), num_tokens_(num_tokens) {
    if (!model.latent.rank) return;
    if (model.latent.query_rank) queries_ = arena.allocate_floats(num_tokens * query_stride());
    absorbed_ = arena.allocate_floats(num_tokens * absorbed_stride());
    attended_ = arena.allocate_floats(num_tokens * attended_stride());
  }

  // Return the floats of a token's projection.
  static int64_t projection_stride(const Decoder& model) {
    const LatentShape& latent = model.latent;
    const int64_t query = model.num_heads * (model.rotary_dim + latent.plain_dim);
    return (latent.query_rank ? latent.query_rank : query) + model.head_dim;
  }

  float* absorbed() const { return absorbed_; }  // [num_tokens, num_heads, head_dim]: queries
  float* attended() const { return attended_; }  // [num_tokens, num_heads, rank]
  int64_t absorbed_stride() const { return model_.num_heads * model_.head_dim; }
  int64_t attended_stride() const { return model_.num_heads * model_.latent.rank; }

  // Write the keys of all tokens to the cache, and the queries to `absorbed`. index: of the layer.
  // projected: [num_tokens, projection_stride], overwritten. scratch: for quantized rows.
  void project(const Layer& layer, int64_t index, const LoraPass& adapters, const KvLayer& kv,
               float* projected, void* scratch, ThreadTeam team) {
    const LatentWeights& weights = *layer.latent;
    const LatentShape& latent = model_.latent;
    const int64_t stride = projection_stride(model_), rotary = model_.rotary_dim;
    const Activations compressed = {projected, stride, num_tokens_, scratch};
    team.parallel_for_ranges(num_tokens_, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        float* const row = projected + token * stride;
        write_key(layer, kv, token, row + stride - model_.head_dim);
        if (latent.query_rank) {
          rms_norm(row, weights.query_norm, kLatentNormEps, latent.query_rank, row);
        }
      }
      if (latent.query_rank) quantize_rows(weights.query_up, compressed, own);
    });
    if (latent.query_rank) {
      gemm(weights.query_up, compressed, queries_, query_stride(), Store::kOverwrite, team);
      adapters.adapt({index, &LoraLayer::query_up}, {0, num_tokens_}, compressed, queries_,
                     query_stride(), team);
    }
    const float* const queries = latent.query_rank ? queries_ : projected;
    const int64_t queries_stride = latent.query_rank ? query_stride() : stride;
    gemm_stacked({&weights.to_keys, model_.num_heads, latent.rank, queries + rotary,
                  queries_stride, query_dim(), num_tokens_, absorbed_ + rotary, absorbed_stride(),
                  model_.head_dim},
                 team);
    adapters.adapt_heads(index, LatentHalf::kKeys,
                         {model_.num_heads, queries + rotary, queries_stride, query_dim(),
                          absorbed_ + rotary, absorbed_stride(), model_.head_dim},
                         team);
    rotate_queries(layer, queries, queries_stride, team);
  }

  // Write the values of what the heads attend to, [num_tokens, num_heads, value_dim].
  // index: of the layer.
  void expand(const Layer& layer, int64_t index, const LoraPass& adapters, float* output,
              ThreadTeam team) {
    const LatentShape& latent = model_.latent;
    const int64_t output_stride = model_.num_heads * latent.value_dim;
    gemm_stacked({&layer.latent->to_values, model_.num_heads, latent.value_dim, attended_,
                  attended_stride(), latent.rank, num_tokens_, output, output_stride,
                  latent.value_dim},
                 team);
    adapters.adapt_heads(index, LatentHalf::kValues,
                         {model_.num_heads, attended_, attended_stride(), latent.rank, output,
                          output_stride, latent.value_dim},
                         team);
  }

 private:
  const Decoder& model_;
  const RopeAndCache& rope_and_cache_;
  int64_t num_tokens_;
  float* queries_ = nullptr;   // [num_tokens, num_heads, query_dim]; null without latents of queries
  float* absorbed_ = nullptr;
  float* attended_ = nullptr;

  int64_t query_dim() const { return model_.rotary_dim + model_.latent.plain_dim; }
  int64_t query_stride() const { return model_.num_heads * query_dim(); }

  void write_key(const Layer& layer, const KvLayer& kv, int64_t token, float* key) const {
    float* const latent = key + model_.rotary_dim;
    rms_norm(latent, layer.latent->kv_norm, kLatentNormEps, model_.latent.rank, latent);
    rope_and_cache_.rotate(layer, token, key);
    kv.write_latent(rope_and_cache_.slot(token), key);
  }

  // Run a stage that puts the rotated dimensions of the queries before the absorbed ones.
  void rotate_queries(const Layer& layer, const float* queries, int64_t stride, ThreadTeam team) {
    team.parallel_for_ranges(num_tokens_ * model_.num_heads, [&](Range own) {
      for (int64_t index = own.begin; index < own.end; ++index) {
        const int64_t token = index / model_.num_heads, head = index % model_.num_heads;
        float* const to = absorbed_ + index * model_.head_dim;
        std::copy_n(queries + token * stride + head * query_dim(), model_.rotary_dim, to);
        rope_and_cache_.rotate(layer, token, to);
        rope_and_cache_.scale_query(layer, token, to);
      }
    });
  }
};

}  // namespace specdec
