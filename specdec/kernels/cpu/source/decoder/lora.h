// Updates of linear layers by LoRA adapters (Hu et al. 2021): y += B (A x), with the scale in B.
//
// Each token runs with at most one adapter. A token's update is sums over its own row in a fixed
// order, so it is the same bits alone and in any batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "gemm/matrix.h"

namespace specdec {

// B of one projection, [its outputs, its ranks].
struct LoraExpansion {
  Matrix weight;
  int64_t first_rank;    // its first column in the result of A
  int64_t first_output;  // its first column in the output of the layer
};

// The update of one linear layer; without expansions none.
struct LoraUpdate {
  Matrix shrink;  // the matrices A of all projections, [sum of ranks, in_features]
  const LoraExpansion* expansions;
  int64_t num_expansions;
};

// B of one head in the update of the expansion of latents, with r ranks.
struct HeadUpdate {
  Matrix from_query;  // its rows of keys, transposed, [r, plain_dim]
  Matrix to_value;    // its rows of values, [value_dim, r]
};

// The update of the matrices that expand latents to keys and values, in the absorbed form: that of
// the keys is applied to a head's query, and that of the values to what the head attends to.
struct LatentUpdate {
  Matrix from_latent;       // A, [r, rank of latents]
  Matrix to_latent;         // A transposed, [rank of latents, r]
  const HeadUpdate* heads;  // [num_heads], of this rank; null without an update
};

// The updates of one decoder layer.
struct LoraLayer {
  LoraUpdate qkv, output, gate_up, down;
  LoraUpdate query_up;     // of latent attention, from the latent of queries
  LoraUpdate fusion;       // of the first layer of a draft head: what makes its input
  LatentUpdate expansion;  // of latent attention
};

// Consecutive tokens of a batch that run with the same adapter.
struct AdapterRun {
  const LoraLayer* layers;  // [num_layers]
  int64_t width;            // the most products with A of a token in a layer
  int64_t begin, end;
};

// The runs of a batch whose tokens run with the adapters of those of another batch.
class AdapterRuns {
 public:
  // Add `count` tokens, which run with the adapter of a token of `batch`.
  void add(const Batch& batch, int64_t token, int64_t count) {
    const int64_t begin = num_tokens_;
    num_tokens_ += count;
    const AdapterRun* const end = batch.adapter_runs + batch.num_adapter_runs;
    const AdapterRun* const run = std::find_if(batch.adapter_runs, end, [&](const AdapterRun& each) {
      return each.begin <= token && token < each.end;
    });
    if (run == end) return;
    if (!runs_.empty() && runs_.back().end == begin && runs_.back().layers == run->layers) {
      runs_.back().end = num_tokens_;
    } else {
      runs_.push_back({run->layers, run->width, begin, num_tokens_});
    }
  }

  // Give the runs to a batch, which this must outlive unchanged.
  void set(Batch& batch) const {
    batch.adapter_runs = runs_.data();
    batch.num_adapter_runs = runs_.size();
  }

 private:
  std::vector<AdapterRun> runs_;
  int64_t num_tokens_ = 0;
};

}  // namespace specdec
