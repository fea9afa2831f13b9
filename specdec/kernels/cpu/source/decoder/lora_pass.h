// Updates of the linear layers of a forward pass by adapters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "base/arena.h"
#include "decoder/lora.h"
#include "gemm/gemm_float.h"

namespace specdec {

// One linear layer of one decoder layer, which adapters may update. Outputs before first_output are
// those of projections that are not computed.
struct LoraTarget {
  int64_t layer;
  LoraUpdate LoraLayer::* linear;
  int64_t first_output = 0;
};

// The halves of the expansion of latents.
enum class LatentHalf { kKeys, kValues };

// Rows of the heads of a batch's tokens: input and output of a matrix of each head, which are x_step
// and y_step further for the next head.
struct HeadRows {
  int64_t num_heads;
  const float* x;
  int64_t x_stride, x_step;
  float* y;
  int64_t y_stride, y_step;
};

// The adapters of a batch. All threads of a team call it.
class LoraPass {
 public:
  LoraPass(const Batch& batch, Arena& arena) : batch_(batch) {
    for (int64_t run = 0; run < batch.num_adapter_runs; ++run) {
      width_ = std::max(width_, batch.adapter_runs[run].width);
    }
    hidden_ = arena.allocate_floats(batch.num_tokens * width_);
  }

  // Add the updates of a linear layer by the adapters of `tokens` to its output y, whose columns
  // begin with first_output. rows: its input. The rows of both begin with the first of the tokens.
  // Two stages for all adapters, none without any.
  void adapt(LoraTarget target, Range tokens, const Activations& rows, float* y, int64_t y_stride,
             ThreadTeam team) const {
    if (batch_.num_adapter_runs == 0) return;
    std::vector<GroupedProduct> shrinks, expansions;
    for (int64_t run = 0; run < batch_.num_adapter_runs; ++run) {
      const AdapterRun& adapter = batch_.adapter_runs[run];
      const LoraUpdate& update = adapter.layers[target.layer].*target.linear;
      const int64_t first = std::max(adapter.begin, tokens.begin) - tokens.begin;
      const int64_t count = std::min(adapter.end, tokens.end) - tokens.begin - first;
      if (count <= 0 || !update.num_expansions) continue;
      float* const hidden = hidden_ + first * width_;
      shrinks.push_back({&update.shrink, rows.x + first * rows.stride, rows.stride, count, hidden,
                         width_, Store::kOverwrite});
      for (int64_t part = 0; part < update.num_expansions; ++part) {
        const LoraExpansion& each = update.expansions[part];
        if (each.first_output < target.first_output) continue;
        expansions.push_back({&each.weight, hidden + each.first_rank, width_, count,
                              y + first * y_stride + each.first_output - target.first_output,
                              y_stride, Store::kAccumulate});
      }
    }
    gemm_grouped(shrinks.data(), shrinks.size(), team);
    gemm_grouped(expansions.data(), expansions.size(), team);
  }

  // Add the updates of one half of a layer's expansion of latents to the output of the heads.
  void adapt_heads(int64_t layer, LatentHalf half, const HeadRows& rows, ThreadTeam team) const {
    if (batch_.num_adapter_runs == 0) return;
    std::vector<GroupedProduct> shrinks, expansions;
    for (int64_t run = 0; run < batch_.num_adapter_runs; ++run) {
      const AdapterRun& adapter = batch_.adapter_runs[run];
      const LatentUpdate& update = adapter.layers[layer].expansion;
      if (!update.heads) continue;
      const int64_t count = adapter.end - adapter.begin, ranks = update.from_latent.out_features;
      for (int64_t head = 0; head < rows.num_heads; ++head) {
        const HeadUpdate& own = update.heads[head];
        const bool is_keys = half == LatentHalf::kKeys;
        float* const hidden = hidden_ + adapter.begin * width_ + head * ranks;
        shrinks.push_back({is_keys ? &own.from_query : &update.from_latent,
                           rows.x + adapter.begin * rows.x_stride + head * rows.x_step,
                           rows.x_stride, count, hidden, width_, Store::kOverwrite});
        expansions.push_back({is_keys ? &update.to_latent : &own.to_value, hidden, width_, count,
                              rows.y + adapter.begin * rows.y_stride + head * rows.y_step,
                              rows.y_stride, Store::kAccumulate});
      }
    }
    gemm_grouped(shrinks.data(), shrinks.size(), team);
    gemm_grouped(expansions.data(), expansions.size(), team);
  }

 private:
  const Batch& batch_;
  int64_t width_ = 0;  // the most products with A of a token in a layer by an adapter of the batch
  float* hidden_;      // [num_tokens, width]
};

}  // namespace specdec
