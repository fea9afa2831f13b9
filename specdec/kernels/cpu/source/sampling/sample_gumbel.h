// Gumbel noise, equal to `specdec/sampling/gumbel.py`: its random bits, and their transformation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sampling/philox.h"
#include "sampling/sample_chunks.h"
#include "sampling/sample_simd.h"

namespace specdec::sampling {

constexpr uint32_t kFirstChunkCounter = 1u << 31;
constexpr int64_t kTokensPerCall = 4;
constexpr uint32_t kCallsPerChunk = kChunkTokens / kTokensPerCall;
constexpr float kLargestUniform = 1.0f - 0x1p-24f;
constexpr float kGumbelRange = 29.87f;  // upper bound of the largest noise minus the smallest

// Key of a row's noise; with the token it determines the random bits.
struct GumbelKey {
  uint64_t seed;
  uint32_t choice, position;

  Words random_words(uint32_t counter) const {
    return philox4x32({counter, position, choice, 0}, seed);
  }
};

// Return the exponential variable of 32 random bits; Gumbel noise is -log of one, or of a sum of
// two.
inline float exponential_of_bits(uint32_t bits) {
  const float uniform = static_cast<float>(bits) * 0x1p-32f + 0x1p-33f;
  return -std::log1p(-std::min(uniform, kLargestUniform));
}

// Largest noise of each of kFloatLanes chunks, with an error below 1e-4, and the offset of its
// token.
struct ApproxChunkMax {
  FloatLanes gumbel;
  WordLanes offsets;
};

inline ApproxChunkMax approx_chunk_max(const GumbelKey& key, uint32_t first_chunk) {
  WordLanes bits = {}, upper = {};
  for (int64_t i = 0; i < kFloatLanes; ++i) {
    const Words random_words =
        key.random_words(kFirstChunkCounter + first_chunk + static_cast<uint32_t>(i));
    bits[i] = random_words.w0;
    upper[i] = random_words.w1;
  }
  const FloatLanes v = __builtin_convertvector(bits, FloatLanes) * 0x1p-32f + 0x1p-33f;
  const FloatLanes complement = v < kLargestUniform ? 1.0f - v : FloatLanes{} + 0x1p-24f;
  // -log(1 - v); for small v by its series, because 1 - v loses too many bits.
  const FloatLanes series = v * (1.0f + v * (0.5f + v * (1 / 3.0f + v * (0.25f + v * 0.2f))));
  const FloatLanes variable = v < 0.0625f ? series : -approx_log(complement);
  return {approx_log(variable) * -1.0f + 4.1588831f, upper >> (32 - 6)};  // of variable / 64
}

}  // namespace specdec::sampling
