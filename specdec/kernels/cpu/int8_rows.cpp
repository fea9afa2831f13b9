#include "int8_rows.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
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

// Writes the digits of a group of inputs, and their corrections.
template <int kDigits>
void fill_group(const DigitLayout& layout, const float* x, int64_t count, float scale,
                int8_t* digits, int32_t* corrections) {
  const float inverse = 1 / scale;
  Ints sums[kDigits] = {};
  const auto fill = [&](Floats values, int64_t index, int64_t num) {
    const Floats exact = values * inverse, rounded = nearest(exact);
    put(rounded, num, digits + index, sums[0]);
    if constexpr (kDigits == 2) {
      put(nearest((exact - rounded) * kStepsOfSecond), num, digits + layout.stride + index,
          sums[1]);
    }
  };
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) fill(load(x + index), index, kLanes);
  if (index < count) fill(load_part(x + index, count - index), index, count - index);
  for (int digit = 0; digit < kDigits; ++digit) {
    corrections[digit * layout.num_groups] = -kWeightOffset * sum_of(sums[digit]);
  }
}

template <int kDigits>
void fill_row(const DigitRows& batch, int64_t row, const float* x, int64_t in_features) {
  const DigitLayout& layout = batch.layout;
  float* const scales = batch.scales + row * layout.num_groups;
  int32_t* const corrections = batch.corrections + row * kDigits * layout.num_groups;
  int8_t* const digits = batch.digits + row * kDigits * layout.stride;
  std::fill_n(corrections, kDigits * layout.num_groups, 0);
  std::fill_n(digits, kDigits * layout.stride, 0);
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    const int64_t first = group * layout.group, count = std::min(layout.group, in_features - first);
    scales[group] = scale_of(x + first, count);
    if (std::isnan(scales[group])) continue;
    fill_group<kDigits>(layout, x + first, count, scales[group], digits + first,
                        corrections + group);
  }
}

int64_t group_of(const Matrix& matrix) {
  return matrix.format == Format::kW8A8 ? kW8A8Group : round_up(matrix.in_features, kQuad);
}

}  // namespace

DigitLayout::DigitLayout(const Matrix& matrix)
    : digits(matrix.format == Format::kInt8 ? 2 : 1),
      group(group_of(matrix)),
      num_groups(divide_up(matrix.in_features, group)),
      stride(aligned(matrix.in_features)) {}

int64_t DigitLayout::scales_bytes(int64_t rows) const {
  return aligned(rows * num_groups * static_cast<int64_t>(sizeof(float)));
}

int64_t DigitLayout::corrections_bytes(int64_t rows) const {
  return aligned(rows * digits * num_groups * static_cast<int64_t>(sizeof(int32_t)));
}

int64_t DigitLayout::bytes(int64_t rows) const {
  return scales_bytes(rows) + corrections_bytes(rows) + rows * digits * stride;
}

DigitRows::DigitRows(const Matrix& matrix, int64_t rows, void* scratch) : layout(matrix) {
  auto* memory = static_cast<std::byte*>(scratch);
  scales = reinterpret_cast<float*>(memory);
  corrections = reinterpret_cast<int32_t*>(memory += layout.scales_bytes(rows));
  digits = reinterpret_cast<int8_t*>(memory += layout.corrections_bytes(rows));
}

void DigitRows::fill(int64_t row, const float* x, int64_t in_features) {
  if (layout.digits == 1) {
    fill_row<1>(*this, row, x, in_features);
  } else {
    fill_row<2>(*this, row, x, in_features);
  }
}

}  // namespace specdec
