// Access to rows of logits, in float32 or bfloat16, in chunks of 64 tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sampling/sample_simd.h"

namespace specdec::sampling {

constexpr int64_t kChunkTokens = 64;

inline int64_t num_chunks_of(int64_t num_tokens) {
  return (num_tokens + kChunkTokens - 1) / kChunkTokens;
}

// Write one chunk of a row to values [kChunkTokens], padded with -inf past the end of the row.
template <typename T>
inline void load_chunk(const T* row, int64_t chunk, int64_t num_tokens, float* values) {
  const int64_t start = chunk * kChunkTokens, count = std::min(kChunkTokens, num_tokens - start);
  const T* source = row + start;
  T padded[kChunkTokens] = {};
  if (count < kChunkTokens) {
    std::copy_n(source, count, padded);
    source = padded;
  }
  for (int64_t i = 0; i < kChunkTokens; i += kFloatLanes) {
    const FloatLanes lanes = load_floats(source + i);
    std::memcpy(values + i, &lanes, sizeof lanes);
  }
  std::fill(values + count, values + kChunkTokens, -kInfinity);
}

// Return the lane-wise maximum of a chunk and of `best`. NaN counts as -inf, provided that `best`
// holds none. Sets has_nan where a logit is NaN or +inf.
inline FloatLanes max_of_chunk(const float* chunk, FloatLanes best, IntLanes& has_nan) {
  for (int64_t i = 0; i < kChunkTokens; i += kFloatLanes) {
    const auto lanes = load<FloatLanes>(chunk + i);
    best = lanes > best ? lanes : best;
    has_nan |= ~(lanes < kInfinity);
  }
  return best;
}

inline FloatLanes negative_infinity() { return FloatLanes{} - kInfinity; }

}  // namespace specdec::sampling
