// Dynamic quantization of activations to int8.
#pragma once

#include <cstdint>

#include "gemm/packed_layout.h"

namespace specdec {

constexpr int64_t kQuad = inputs_per_step(Format::kInt8);  // inputs of one dot product instruction
constexpr float kLoStepsPerHi = 254;    // the rounding error of hi is at most 1/2
constexpr int32_t kWeightOffset = 128;  // makes stored weights unsigned
constexpr int64_t kW8A8Group = 64;      // inputs that share a scale

// Layout of quantized activations: kInt8 has a hi and a lo part and one scale per row, kW8A8 one
// part and a scale for each group of inputs.
struct QuantizedLayout {
  int64_t num_parts;   // 2: hi and lo; 1: hi only
  int64_t group_size;  // inputs that share a scale; whole quads
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
  int8_t* values;  // [rows, num_parts, stride], padded with zeros

  QuantizedRows(const Matrix& matrix, int64_t rows, void* scratch);

  void quantize(int64_t row, const float* x, int64_t in_features);
};

}  // namespace specdec
