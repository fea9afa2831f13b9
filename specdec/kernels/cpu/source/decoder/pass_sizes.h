// Sizes of the buffers of a forward pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decoder/decoder.h"
#include "decoder/hidden_units.h"
#include "decoder/latent_attention.h"
#include "decoder/mixture.h"

namespace specdec {

// Widths of a token's projections and outputs, in floats.
struct Widths {
  int64_t gates;             // of values of heads; 0 without attention gates
  int64_t qkv;               // gates, query, key and value heads; with latents as LatentAttention
  int64_t attention_output;  // values of heads
  int64_t hidden_units;      // of one row of an MLP
  int64_t projection;        // the widest with which a layer begins
  int64_t output;            // the widest of attention and recurrences

  explicit Widths(const Decoder& model) {
    const int64_t queries = model.num_heads * model.head_dim;
    gates = model.traits.has_attention_gate ? queries : 0;
    qkv = gates + queries + 2 * model.num_kv_heads * model.head_dim;
    attention_output = queries;
    if (model.latent.rank) {
      qkv = LatentAttention::projection_stride(model);
      attention_output = model.num_heads * model.latent.value_dim;
    }
    hidden_units = units_stride(model.traits, model.num_hidden_units);
    output = std::max(attention_output, model.recurrent.num_outputs());
    projection = qkv;
    for (int64_t index = 0; index < model.num_layers; ++index) {
      const Layer& layer = model.layers[index];
      if (layer.recurrent) projection = std::max(projection, layer.qkv.out_features);
    }
  }
};

// Return the bytes that quantized rows need in the products of any layer: those of a pass, of which
// an MLP takes mlp_rows at a time.
inline int64_t matrix_scratch_bytes(const Decoder& model, int64_t rows, int64_t mlp_rows) {
  int64_t max_size = 0;
  const auto add = [&](const Matrix& matrix, int64_t num_rows) {
    max_size = std::max(max_size, scratch_bytes(matrix, num_rows));
  };
  for (int64_t index = 0; index < model.num_layers; ++index) {
    const Layer& layer = model.layers[index];
    add(layer.qkv, rows);
    if (layer.latent) add(layer.latent->query_up, rows);
    add(layer.output, rows);
    for_each_mlp_matrix(layer, [&](const Matrix& matrix) { add(matrix, mlp_rows); });
  }
  return max_size;
}

}  // namespace specdec
