#include "int8_rows.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace specdec {
namespace {

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

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

using Digits = int8_t __attribute__((vector_size(kLanes)));

// To the nearest integers, ties to even.
SPECDEC_INLINE Floats nearest(Floats values) {
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::nearbyint(values[lane]);
  return values;
}

// Writes the first `count` of a vector of integers as digits, and adds them to their sums.
SPECDEC_INLINE void put(Floats integers, int64_t count, int8_t* digits, Ints& sums) {
  const Ints values = __builtin_convertvector(integers, Ints);
  const Digits narrow = __builtin_convertvector(values, Digits);
  std::memcpy(digits, &narrow, count);
  sums += values;
}

int32_t sum_of(Ints lanes) {
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// The digits of a row, which are `stride` apart, and what kWeightOffset makes of them.
template <int kDigits>
void fill_digits(const float* x, int64_t count, int8_t* digits, int64_t stride, DigitRow& row) {
  const float inverse = 1 / row.scale;
  Ints sums[kDigits] = {};
  const auto fill = [&](Floats values, int64_t index, int64_t num) {
    const Floats exact = values * inverse, rounded = nearest(exact);
    put(rounded, num, digits + index, sums[0]);
    if constexpr (kDigits == 2) {
      put(nearest((exact - rounded) * kStepsOfSecond), num, digits + stride + index, sums[1]);
    }
  };
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) fill(load(x + index), index, kLanes);
  if (index < count) fill(load_part(x + index, count - index), index, count - index);
  for (int digit = 0; digit < kDigits; ++digit) {
    row.corrections[digit] = -kWeightOffset * sum_of(sums[digit]);
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
  rows[row] = {scale_of(x, in_features), {0, 0}};
  if (std::isnan(rows[row].scale)) return;
  if (digits_per_row == 1) {
    fill_digits<1>(x, in_features, first, stride, rows[row]);
  } else {
    fill_digits<2>(x, in_features, first, stride, rows[row]);
  }
}

}  // namespace specdec
