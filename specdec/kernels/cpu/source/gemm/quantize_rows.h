// Dynamic quantization of activations to 8 or 16 bits.
#pragma once

#include <cstdint>

#include "base/simd_math.h"
#include "gemm/int8_dot.h"
#include "gemm/packed_layout.h"

namespace specdec {

constexpr int64_t kQuad = inputs_per_step(Format::kInt8);
constexpr float kLoStepsPerHi = 254;    // the rounding error of hi is at most 1/2
constexpr int32_t kWeightOffset = 128;  // makes stored weights unsigned
constexpr int64_t kW8A8Group = 64;      // inputs that share a scale

// Return the number of values that an activation is stored as. Without products of bytes, the hi
// and lo parts are one integer: hi * kLoStepsPerHi + lo.
constexpr int num_parts(Format format) { return format == Format::kInt8 && kHasByteDot ? 2 : 1; }

// Return the number of inputs whose products fit into one sum of 32 bits and share a scale:
// 512 * 128 * (127 * kLoStepsPerHi + 127) < 2^31.
constexpr int64_t inputs_per_group(Format format, int64_t in_features) {
  if (format == Format::kW8A8) return kW8A8Group;
  return kHasByteDot ? round_up(in_features, kQuad) : 512;
}

// Layout of quantized activations: kInt8 has one scale per row, kW8A8 one for each group of inputs.
struct QuantizedLayout {
  int64_t num_parts;
  int64_t group_size;  // inputs that share a sum; whole quads
  int64_t num_groups;  // per row
  int64_t stride;      // from one part of a row to the next

  explicit QuantizedLayout(const Matrix& matrix);

  int64_t scales_bytes(int64_t rows) const;
  int64_t compensations_bytes(int64_t rows) const;
  int64_t bytes(int64_t rows) const;  // in total
};

// Quantized activations of a batch, in scratch memory.
struct QuantizedRows {
  QuantizedLayout layout;
  float* scales;  // [rows, num_groups], value of 1 in the hi part
  // [rows, num_parts, num_groups]: -kWeightOffset times the sum of the values, which undoes the
  // offset of the weights (zero-point compensation).
  int32_t* compensations;
  QuantizedValue* values;  // [rows, num_parts, stride], padded with zeros

  QuantizedRows(const Matrix& matrix, int64_t rows, void* scratch);

  void quantize(const Matrix& matrix, int64_t row, const float* x);
};

}  // namespace specdec
