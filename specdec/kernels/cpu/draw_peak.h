// The best token of a row of logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "draw_chunks.h"

namespace specdec::draws {

// The best logit of a row, where NaN counts as -inf, and the first token that has it, 0 where there
// is none. is_broken: whether the row holds NaN or +inf.
struct Peak {
  float value;
  int32_t token;
  int32_t is_broken;
};

template <typename T>
Peak peak_of(const T* row, int64_t num_tokens) {
  FloatLanes best = FloatLanes{} - kInfinity;
  IntLanes found = {};  // which vector of the row each lane's best number is from
  IntLanes is_broken = {};
  const auto take = [&](FloatLanes lanes, int64_t vector) {
    found = lanes > best ? IntLanes{} + static_cast<int32_t>(vector) : found;
    best = lanes > best ? lanes : best;
    is_broken |= ~(lanes < kInfinity);
  };
  const int64_t num_vectors = num_tokens / kFloatLanes;
  for (int64_t i = 0; i < num_vectors; ++i) take(load_floats(row + i * kFloatLanes), i);
  float rest[kChunkTokens];
  const int64_t last_chunk = num_tokens / kChunkTokens;
  if (num_tokens % kFloatLanes != 0) {
    load_chunk(row, last_chunk, num_tokens, rest);
    const int64_t start = num_vectors * kFloatLanes - last_chunk * kChunkTokens;
    take(load_floats(rest + start), num_vectors);
  }
  Peak peak = {largest_of(best), std::numeric_limits<int32_t>::max(), any(is_broken)};
  for (int64_t i = 0; i < kFloatLanes; ++i) {
    const int32_t token = found[i] * static_cast<int32_t>(kFloatLanes) + static_cast<int32_t>(i);
    if (best[i] == peak.value) peak.token = std::min(peak.token, token);
  }
  if (peak.value == -kInfinity) peak.token = 0;
  return peak;
}

}  // namespace specdec::draws
