// The Gumbel noise of `specdec/sampling/gumbel.py`: its random bits, and what they stand for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "draw_chunks.h"
#include "draw_lanes.h"
#include "philox.h"

namespace specdec::draws {

constexpr uint32_t kFirstChunkCounter = 1u << 31;
constexpr int64_t kTokensPerCall = 4;
constexpr uint32_t kCallsPerChunk = kChunkTokens / kTokensPerCall;
constexpr float kLargestUniform = 1.0f - 0x1p-24f;
constexpr float kNoiseRange = 29.87f;  // more than the largest noise less the smallest

// What fixes the noise of a row, together with the token.
struct NoiseKey {
  uint64_t seed;
  uint32_t choice, position;

  Words words(uint32_t counter) const {
    return philox4x32({counter, position, choice, 0}, seed);
  }
};

// The exponential variable of 32 random bits; noise is -log of such, or of their sum.
inline float exponential_of_bits(uint32_t bits) {
  const float uniform = static_cast<float>(bits) * 0x1p-32f + 0x1p-33f;
  return -std::log1p(-std::min(uniform, kLargestUniform));
}

// The largest noise of kFloatLanes chunks, to within 1e-4, and the token of each that has it.
struct RoughNoise {
  FloatLanes noise;
  WordLanes offsets;
};

inline RoughNoise rough_largest_noise(const NoiseKey& key, uint32_t first_chunk) {
  WordLanes bits = {}, upper = {};
  for (int64_t i = 0; i < kFloatLanes; ++i) {
    const Words words = key.words(kFirstChunkCounter + first_chunk + static_cast<uint32_t>(i));
    bits[i] = words.w0;
    upper[i] = words.w1;
  }
  const FloatLanes v = __builtin_convertvector(bits, FloatLanes) * 0x1p-32f + 0x1p-33f;
  const FloatLanes rest = v < kLargestUniform ? 1.0f - v : FloatLanes{} + 0x1p-24f;
  // -log(1 - v), where 1 - v keeps too few bits of a small v by its series.
  const FloatLanes series = v * (1.0f + v * (0.5f + v * (1 / 3.0f + v * (0.25f + v * 0.2f))));
  const FloatLanes variable = v < 0.0625f ? series : -rough_log(rest);
  return {rough_log(variable) * -1.0f + 4.1588831f, upper >> (32 - 6)};  // of variable / 64
}

}  // namespace specdec::draws
