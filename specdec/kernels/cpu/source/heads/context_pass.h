// The pass of a block drafter over new tokens of a context: it writes their KV, and has no output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/arena.h"
#include "decoder/decoder.h"
#include "decoder/lora_pass.h"
#include "decoder/rope_and_cache.h"
#include "gemm/packed_layout.h"

namespace specdec {

// All threads of a team call `run`. Every layer projects the same rows to keys and values, so there
// is no attention and no MLP.
class ContextPass {
 public:
  // memory: null to count the bytes only.
  ContextPass(const Decoder& model, const Batch& batch, KvCache cache, void* memory)
      : model_(model),
        num_tokens_(batch.num_tokens),
        block_size_(batch.block_size),
        cache_(cache),
        rope_and_cache_(model, batch) {
    Arena arena(memory);
    projected_ = arena.allocate_floats(num_tokens_ * stride());
    matrix_scratch_ = arena.allocate(matrix_scratch_bytes());
    adapters_.emplace(batch, arena);
    memory_bytes_ = arena.used();
  }

  int64_t memory_bytes() const { return memory_bytes_; }

  // Write the KV of all layers. inputs: [num_tokens, hidden_size].
  void run(const float* inputs, ThreadTeam team) {
    const Range heads = {model_.num_heads, num_all_heads()};
    const int64_t first_key = heads.begin * model_.head_dim;
    float* const keys = projected_ + first_key - first_output();
    for (int64_t index = 0; index < model_.num_layers; ++index) {
      const Layer& layer = model_.layers[index];
      const Matrix projection = kv_projection(layer);
      const Activations rows = {inputs, projection.in_features, num_tokens_, matrix_scratch_};
      quantize_rows(projection, rows, team);
      gemm(projection, rows, projected_, stride(), Store::kOverwrite, team);
      const LoraTarget keys_and_values = {index, &LoraLayer::qkv, first_key};
      adapters_->adapt(keys_and_values, {0, num_tokens_}, rows, keys, stride(), team);
      const KvLayer kv = kv_of_layer(model_, cache_, {}, block_size_, index);
      rope_and_cache_.run(layer, kv, heads, keys, stride(), nullptr, team);
    }
  }

 private:
  const Decoder& model_;
  int64_t num_tokens_, block_size_;
  KvCache cache_;
  RopeAndCache rope_and_cache_;
  std::optional<LoraPass> adapters_;
  int64_t memory_bytes_;
  float* projected_;  // [num_tokens, stride]: keys and values of a layer, from first_output on
  void* matrix_scratch_;

  int64_t num_all_heads() const { return model_.num_heads + 2 * model_.num_kv_heads; }

  // Return the first output that is computed: of the panel with the first key.
  int64_t first_output() const { return first_of_panel(model_.num_heads * model_.head_dim); }
  int64_t stride() const { return num_all_heads() * model_.head_dim - first_output(); }
  Matrix kv_projection(const Layer& layer) const {
    return outputs_from(layer.qkv, first_output());
  }

  int64_t matrix_scratch_bytes() const {
    int64_t max_size = 0;
    for (int64_t index = 0; index < model_.num_layers; ++index) {
      const Matrix projection = kv_projection(model_.layers[index]);
      max_size = std::max(max_size, scratch_bytes(projection, num_tokens_));
    }
    return max_size;
  }
};

}  // namespace specdec
