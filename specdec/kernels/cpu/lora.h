// Updates of linear layers by LoRA adapters (Hu et al. 2021): y += B (A x), with the scale in B.
//
// Each token runs with at most one adapter. A token's update is sums over its own row in a fixed
// order, so it is the same bits alone and in any batch.
#pragma once

#include <cstdint>

#include "matrix.h"

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

// The updates of one decoder layer.
struct LoraLayer {
  LoraUpdate qkv, output, gate_up, down;
};

// Consecutive tokens of a batch that run with the same adapter.
struct AdapterRun {
  const LoraLayer* layers;  // [num_layers]
  int64_t width;            // the most ranks of a layer's `shrink`
  int64_t begin, end;
};

}  // namespace specdec
