// Dynamic quantization of activations to 8 or 16 bits, by row or by group of inputs.
#include "gemm/quantize_rows.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace specdec {
namespace {

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

// Return the bits of the largest magnitude. Compared as integers, NaN exceeds infinity, and
// infinity exceeds all other values.
uint32_t max_abs_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t index = 0; index < count; ++index) {
    uint32_t bits;
    std::memcpy(&bits, x + index, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest;
}

// Return the scale that maps the largest magnitude to 127; NaN if a value is not finite.
float compute_scale(const float* x, int64_t count) {
  const uint32_t bits = max_abs_bits(x, count);
  if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  return std::max(largest / 127, FLT_MIN);
}

// Round to the nearest integers, ties to even.
SPECDEC_INLINE Floats round_nearest(Floats x) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = std::nearbyint(x[lane]);
  return x;
}

// Store the first `count` integers as quantized values, and add them to `sums`.
SPECDEC_INLINE void store_values(Floats integers, int64_t count, QuantizedValue* target,
                                 Ints& sums) {
  const Ints wide = __builtin_convertvector(integers, Ints);
  const QuantizedVector values = in_quad_order(__builtin_convertvector(wide, QuantizedVector));
  std::memcpy(target, &values, round_up(count, kQuad) * sizeof(QuantizedValue));
  sums += wide;
}

int32_t reduce_sum(Ints lanes) {
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Quantize one group of inputs and compute its compensations.
template <Format kFormat>
void quantize_group(const QuantizedLayout& layout, const float* x, int64_t count, float scale,
                    QuantizedValue* values, int32_t* compensations) {
  constexpr int kParts = num_parts(kFormat);
  const float inverse = 1 / scale;
  Ints sums[kParts] = {};
  const auto quantize = [&](Floats inputs, int64_t index, int64_t num) {
    const Floats exact = inputs * inverse, hi = round_nearest(exact);
    if constexpr (kFormat == Format::kW8A8) {
      store_values(hi, num, values + index, sums[0]);
    } else {
      const Floats lo = round_nearest((exact - hi) * kLoStepsPerHi);
      store_values(kParts == 2 ? hi : hi * kLoStepsPerHi + lo, num, values + index, sums[0]);
      if constexpr (kParts == 2) store_values(lo, num, values + layout.stride + index, sums[1]);
    }
  };
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) quantize(load(x + index), index, kLanes);
  if (index < count) quantize(load_partial(x + index, count - index), index, count - index);
  for (int part = 0; part < kParts; ++part) {
    compensations[part * layout.num_groups] = -kWeightOffset * reduce_sum(sums[part]);
  }
}

template <Format kFormat>
void quantize_row(const QuantizedRows& batch, int64_t row, const float* x, int64_t in_features) {
  constexpr int kParts = num_parts(kFormat);
  const QuantizedLayout& layout = batch.layout;
  float* const scales = batch.scales + row * layout.num_groups;
  int32_t* const compensations = batch.compensations + row * kParts * layout.num_groups;
  QuantizedValue* const values = batch.values + row * kParts * layout.stride;
  std::fill_n(compensations, kParts * layout.num_groups, 0);
  std::fill_n(values, kParts * layout.stride, QuantizedValue{0});
  const float row_scale = kFormat == Format::kInt8 ? compute_scale(x, in_features) : 0;
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    const int64_t first = group * layout.group_size;
    const int64_t count = std::min(layout.group_size, in_features - first);
    scales[group] = kFormat == Format::kInt8 ? row_scale : compute_scale(x + first, count);
    if (std::isnan(scales[group])) continue;
    quantize_group<kFormat>(layout, x + first, count, scales[group], values + first,
                            compensations + group);
  }
}

}  // namespace

QuantizedLayout::QuantizedLayout(const Matrix& matrix)
    : num_parts(specdec::num_parts(matrix.format)),
      group_size(inputs_per_group(matrix.format, matrix.in_features)),
      num_groups(ceil_div(matrix.in_features, group_size)),
      stride(aligned(matrix.in_features)) {}

int64_t QuantizedLayout::scales_bytes(int64_t rows) const {
  return aligned(rows * num_groups * static_cast<int64_t>(sizeof(float)));
}

int64_t QuantizedLayout::compensations_bytes(int64_t rows) const {
  return aligned(rows * num_parts * num_groups * static_cast<int64_t>(sizeof(int32_t)));
}

int64_t QuantizedLayout::bytes(int64_t rows) const {
  const int64_t values_bytes = rows * num_parts * stride * int64_t{sizeof(QuantizedValue)};
  return scales_bytes(rows) + compensations_bytes(rows) + values_bytes;
}

QuantizedRows::QuantizedRows(const Matrix& matrix, int64_t rows, void* scratch) : layout(matrix) {
  auto* memory = static_cast<std::byte*>(scratch);
  scales = reinterpret_cast<float*>(memory);
  compensations = reinterpret_cast<int32_t*>(memory += layout.scales_bytes(rows));
  values = reinterpret_cast<QuantizedValue*>(memory += layout.compensations_bytes(rows));
}

void QuantizedRows::quantize(const Matrix& matrix, int64_t row, const float* x) {
  if (matrix.format == Format::kInt8) {
    quantize_row<Format::kInt8>(*this, row, x, matrix.in_features);
  } else {
    quantize_row<Format::kW8A8>(*this, row, x, matrix.in_features);
  }
}

}  // namespace specdec
