// Recurrent layers: their weights, and the sizes of one rank.
//
// A layer maps the inputs of tokens, which are part of its projection, to outputs by a state of the
// sequence. Its kinds and their order are those of `specdec/models/config/recurrent.py`.
#pragma once

#include <cstdint>

namespace specdec {

enum class RecurrenceKind : int32_t {
  kNone = 0,
  kShortConvolution = 1,
  kGatedDelta = 2,
  kStateSpace = 3,
};

// Sizes of the recurrent layers of a model. Each head reads the keys and queries of one of
// `num_keys`: of a key head (Gated DeltaNet), or of a group (Mamba-2).
struct RecurrentShape {
  RecurrenceKind kind;
  int64_t num_layers;
  int64_t kernel_size;   // of the convolution
  int64_t num_channels;  // that are convolved
  int64_t num_heads, key_dim, value_dim;  // of the memory; 0 without one
  int64_t num_keys;
  int64_t heads_per_key, first_head;  // first_head: of this rank, among those of all ranks

  int64_t window() const { return kernel_size - 1; }  // earlier inputs that a convolution reads
  int64_t num_values() const { return num_heads * value_dim; }
  int64_t memory_size() const { return num_heads * key_dim * value_dim; }
  int64_t key_of(int64_t head) const { return (first_head + head) / heads_per_key; }

  // Numbers of an input that each head has beside channels.
  int64_t num_rates() const {
    switch (kind) {
      case RecurrenceKind::kGatedDelta:
        return 2;
      case RecurrenceKind::kStateSpace:
        return 1;
      default:
        return 0;
    }
  }
  int64_t num_inputs() const { return num_channels + num_rates() * num_heads; }
  int64_t num_outputs() const {
    return kind == RecurrenceKind::kShortConvolution ? num_channels : num_values();
  }
};

// First columns of the parts of a projection, and of an input. Those of queries, keys and values
// are channels of the convolution.
struct RecurrentColumns {
  int64_t inputs, gates;  // of a projection
  int64_t channels, queries, keys, values, shares, decays;  // of an input
};

inline RecurrentColumns columns_of(const RecurrentShape& shape) {
  RecurrentColumns columns = {};
  const int64_t key_channels = shape.num_keys * shape.key_dim;
  switch (shape.kind) {
    case RecurrenceKind::kGatedDelta:
      columns.gates = shape.num_inputs();
      columns.decays = shape.num_heads;
      columns.channels = columns.queries = 2 * shape.num_heads;
      columns.keys = columns.queries + key_channels;
      columns.values = columns.keys + key_channels;
      break;
    case RecurrenceKind::kStateSpace:
      columns.inputs = columns.keys = shape.num_values();
      columns.queries = columns.keys + key_channels;
      columns.shares = columns.decays = shape.num_channels;
      break;
    default:
      columns.gates = shape.num_channels;
  }
  return columns;
}

// Weights of a layer beside its projections.
struct RecurrentWeights {
  const float* taps;              // [kernel_size, num_channels]
  const float* convolution_bias;  // [num_channels], or null
  const float* decay_rates;       // [num_heads]
  const float* step_biases;       // [num_heads]
  const float* skips;             // [num_heads], of values in outputs; or null
  const float* norm;  // [value_dim] of each head, or [num_heads, value_dim] with groups
};

}  // namespace specdec
