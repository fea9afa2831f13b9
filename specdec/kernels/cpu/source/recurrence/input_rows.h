// Inputs of recurrent layers in float32, and in the storage format of their pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/format_convert.h"

namespace specdec {

// The inputs of one sequence in order: those that its slot has, then those of the batch's tokens.
struct InputRows {
  float* stored;
  int64_t num_stored, stored_stride;
  float* fresh;
  int64_t fresh_stride;

  float* row(int64_t index) const {
    return index < num_stored ? stored + index * stored_stride
                              : fresh + (index - num_stored) * fresh_stride;
  }
};

// to = from, converted to float32, over `count` numbers.
template <Format kFormat>
SPECDEC_INLINE void load_numbers(const typename FormatTraits<kFormat>::Element* from, int64_t count,
                                 float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_as_float<kFormat>(from + i));
  if (i < count) store_partial(to + i, load_part_as_float<kFormat>(from + i, count - i), count - i);
}

// to = from, rounded to the format, over `count` numbers.
template <Format kFormat>
SPECDEC_INLINE void store_numbers(const float* from, int64_t count,
                                  typename FormatTraits<kFormat>::Element* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = FormatTraits<kFormat>::from_float(from[i]);
}

// Round `count` numbers to the format in place: an input that is replayed has been rounded too.
template <Format kFormat>
SPECDEC_INLINE void round_numbers(float* x, int64_t count) {
  if constexpr (kFormat == Format::kFloat32) return;
  typename FormatTraits<kFormat>::Element rounded[kLanes];
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t own = std::min<int64_t>(kLanes, count - i);
    store_numbers<kFormat>(x + i, own, rounded);
    load_numbers<kFormat>(rounded, own, x + i);
  }
}

}  // namespace specdec
