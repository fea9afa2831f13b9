#include "int8_rows.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace specdec {
namespace {

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The bits of the largest magnitude. As integers, NaNs are above infinity and that above the rest.
uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t index = 0; index < count; ++index) {
    uint32_t bits;
    std::memcpy(&bits, x + index, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest;
}

// What 1 stands for in a row whose largest magnitude is 127 of it; NaN if it is not finite.
float scale_of(const float* x, int64_t count) {
  const uint32_t bits = largest_bits(x, count);
  if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  return std::max(largest / 127, FLT_MIN);
}

int32_t sum_of(const int8_t* digits, int64_t count) {
  int32_t sum = 0;
  for (int64_t index = 0; index < count; ++index) sum += digits[index];
  return sum;
}

void fill_one(const float* x, int64_t count, float inverse, int8_t* first) {
  for (int64_t index = 0; index < count; ++index) {
    first[index] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(x[index] * inverse)));
  }
}

void fill_both(const float* x, int64_t count, float inverse, int8_t* first, int8_t* second) {
  for (int64_t index = 0; index < count; ++index) {
    const float exact = x[index] * inverse, rounded = std::nearbyint(exact);
    const float rest = std::nearbyint((exact - rounded) * kStepsOfSecond);
    first[index] = static_cast<int8_t>(static_cast<int32_t>(rounded));
    second[index] = static_cast<int8_t>(static_cast<int32_t>(rest));
  }
}

int64_t digits_of(const Matrix& matrix) { return matrix.format == Format::kInt8 ? 2 : 1; }

}  // namespace

DigitRows::DigitRows(const Matrix& matrix, int64_t num_rows, void* scratch)
    : digits_per_row(digits_of(matrix)),
      stride(aligned(matrix.in_features)),
      rows(static_cast<DigitRow*>(scratch)),
      digits(static_cast<int8_t*>(scratch) +
             aligned(num_rows * static_cast<int64_t>(sizeof(DigitRow)))) {}

int64_t DigitRows::bytes(const Matrix& matrix, int64_t num_rows) {
  return aligned(num_rows * static_cast<int64_t>(sizeof(DigitRow))) +
         num_rows * digits_of(matrix) * aligned(matrix.in_features);
}

void DigitRows::fill(int64_t row, const float* x, int64_t in_features) {
  int8_t* const first = digits + row * digits_per_row * stride;
  std::memset(first, 0, digits_per_row * stride);
  const float scale = scale_of(x, in_features);
  rows[row] = {scale, {0, 0}};
  if (std::isnan(scale)) return;
  if (digits_per_row == 1) {
    fill_one(x, in_features, 1 / scale, first);
  } else {
    fill_both(x, in_features, 1 / scale, first, first + stride);
  }
  for (int64_t digit = 0; digit < digits_per_row; ++digit) {
    rows[row].corrections[digit] = -kWeightOffset * sum_of(first + digit * stride, in_features);
  }
}

}  // namespace specdec
