// The hidden units of an MLP, or of an expert: its activation function.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/elementwise.h"
#include "base/simd_math.h"
#include "decoder/decoder.h"

namespace specdec {

// With at least this many rows per thread, the activation function is parallelized over rows; fewer
// rows would balance badly.
constexpr int64_t kMinRowsPerThread = 2;

// Rows of hidden units: gate, if the MLP has one, then up projection, of `size` units each.
// parameters: of the layer's activation function, or null.
struct HiddenUnits {
  float* begin;
  int64_t size, num_rows;
  const float* parameters = nullptr;
};

// Return the floats from one row of hidden units to the next.
inline int64_t units_stride(const Traits& traits, int64_t size) {
  return (traits.has_gate ? 2 : 1) * size;
}

// Apply the activation function to `count` units in place. up: the units of the up projection.
// parameters: as in HiddenUnits.
inline void activate(const Traits& traits, float* units, const float* up, int64_t count,
                     const float* parameters) {
  switch (traits.activation) {
    case Activation::kSilu:
      return traits.has_gate ? silu_and_mul(units, up, count) : silu(units, count);
    case Activation::kGeluTanh:
      return traits.has_gate ? gelu_and_mul(units, up, count) : gelu(units, count);
    case Activation::kClampedSwiglu:
      return clamped_swiglu(units, up, count);
    case Activation::kRelu2:
      return traits.has_gate ? relu2_and_mul(units, up, count) : relu2(units, count);
    case Activation::kXielu:
      return xielu(units, parameters, count);
  }
}

// Apply the activation function to a range of vectors, with per_row vectors in each row.
inline void activate_vectors(const Traits& traits, const HiddenUnits& units, Range vectors,
                             int64_t per_row) {
  const int64_t stride = units_stride(traits, units.size);
  for (int64_t i = vectors.begin; i < vectors.end;) {
    const int64_t row = i / per_row, begin = i % per_row;
    const int64_t end = std::min(per_row, begin + vectors.end - i);
    float* from = units.begin + row * stride + begin * kLanes;
    activate(traits, from, from + units.size,
             std::min(end * kLanes, units.size) - begin * kLanes, units.parameters);
    i += end - begin;
  }
}

// Run the activation function and quantize its result for the next GEMM, in one stage over rows.
// With few rows, or without quantization, the activation is parallelized over vectors, so that even
// one row is divided, and quantization is a separate stage. scratch: for the quantized rows.
inline Activations activate_and_quantize(const Traits& traits, const Matrix& down,
                                         const HiddenUnits& units, void* scratch,
                                         ThreadTeam team) {
  const Activations rows = {units.begin, units_stride(traits, units.size), units.num_rows, scratch};
  const int64_t per_row = ceil_div(units.size, kLanes);
  if (!quantizes_rows(down) || units.num_rows < kMinRowsPerThread * team.size) {
    team.parallel_for_ranges(units.num_rows * per_row, [&](Range own) {
      activate_vectors(traits, units, own, per_row);
    });
    quantize_rows(down, rows, team);
  } else {
    team.parallel_for_ranges(units.num_rows, [&](Range own) {
      activate_vectors(traits, units, {own.begin * per_row, own.end * per_row}, per_row);
      quantize_rows(down, rows, own);
    });
  }
  return rows;
}

}  // namespace specdec
