// Argmax of a row of logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "sampling/sample_chunks.h"

namespace specdec::sampling {

// Largest logit of a row, where NaN counts as -inf, and the first token that has it; token 0 for a
// row of -inf. has_nan: whether the row holds NaN or +inf.
struct Argmax {
  float value;
  int32_t token;
  int32_t has_nan;
};

template <typename T>
Argmax argmax_of(const T* row, int64_t num_tokens) {
  FloatLanes best = FloatLanes{} - kInfinity;
  IntLanes best_vector = {};  // index of the vector that holds each lane's maximum
  IntLanes has_nan = {};
  const auto update = [&](FloatLanes lanes, int64_t vector) {
    best_vector = lanes > best ? IntLanes{} + static_cast<int32_t>(vector) : best_vector;
    best = lanes > best ? lanes : best;
    has_nan |= ~(lanes < kInfinity);
  };
  const int64_t num_vectors = num_tokens / kFloatLanes;
  for (int64_t i = 0; i < num_vectors; ++i) update(load_floats(row + i * kFloatLanes), i);
  float tail[kChunkTokens];
  const int64_t last_chunk = num_tokens / kChunkTokens;
  if (num_tokens % kFloatLanes != 0) {
    load_chunk(row, last_chunk, num_tokens, tail);
    const int64_t start = num_vectors * kFloatLanes - last_chunk * kChunkTokens;
    update(load_floats(tail + start), num_vectors);
  }
  Argmax result = {max_of(best), std::numeric_limits<int32_t>::max(), any(has_nan)};
  for (int64_t i = 0; i < kFloatLanes; ++i) {
    const int32_t token =
        best_vector[i] * static_cast<int32_t>(kFloatLanes) + static_cast<int32_t>(i);
    if (best[i] == result.value) result.token = std::min(result.token, token);
  }
  if (result.value == -kInfinity) result.token = 0;
  return result;
}

}  // namespace specdec::sampling
