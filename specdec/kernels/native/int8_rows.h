// Rows of floats as one or two rows of 8-bit digits.
#pragma once

#include <cstdint>

#include "panels.h"

namespace specdec {

constexpr int64_t kQuad = inputs_per_step(Format::kInt8);  // what one dot product takes
constexpr float kStepsOfSecond = 254;   // in 1 of the first digit: what is left is at most 1/2
constexpr int32_t kWeightOffset = 128;  // weights are stored as unsigned bytes

struct DigitRow {
  float scale;             // what 1 in the first digit stands for
  int32_t corrections[2];  // for each digit, what kWeightOffset has added to its products, negated
};

// The digits of a batch, in scratch memory.
struct DigitRows {
  int64_t digits_per_row, stride;  // from one row of digits to the next
  DigitRow* rows;                  // [rows]
  int8_t* digits;                  // [rows, digits_per_row, stride], zeros beyond in_features

  DigitRows(const Matrix& matrix, int64_t num_rows, void* scratch);

  static int64_t bytes(const Matrix& matrix, int64_t num_rows);

  void fill(int64_t row, const float* x, int64_t in_features);
};

}  // namespace specdec
