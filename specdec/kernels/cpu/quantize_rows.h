// Rows of floats as 8-bit digits.
#pragma once

#include <cstdint>

#include "packed_layout.h"

namespace specdec {

constexpr int64_t kQuad = inputs_per_step(Format::kInt8);  // what one dot product takes
constexpr float kLoStepsPerHi = 254;    // in 1 of the first digit: what is left is at most 1/2
constexpr int32_t kWeightOffset = 128;  // weights are stored as unsigned bytes
constexpr int64_t kW8A8Group = 64;      // inputs that share a scale

// How a matrix has its rows: kInt8 in two digits and with one scale, kW8A8 in one digit and with a
// scale for each group of inputs.
struct QuantizedLayout {
  int64_t num_parts;   // of each input
  int64_t group_size;  // inputs that share a scale, whole quads
  int64_t num_groups;  // of a row
  int64_t stride;      // from one row of digits to the next

  explicit QuantizedLayout(const Matrix& matrix);

  int64_t scales_bytes(int64_t rows) const;
  int64_t compensations_bytes(int64_t rows) const;
  int64_t bytes(int64_t rows) const;  // in all
};

// The digits of a batch, in scratch memory.
struct QuantizedRows {
  QuantizedLayout layout;
  float* scales;           // [rows, num_groups]: what 1 in the first digit stands for
  int32_t* compensations;  // [rows, digits, num_groups]: what kWeightOffset has added to the
                           // products of these digits, negated
  int8_t* values;          // [rows, digits, stride], zeros beyond in_features

  QuantizedRows(const Matrix& matrix, int64_t rows, void* scratch);

  void quantize(int64_t row, const float* x, int64_t in_features);
};

}  // namespace specdec
