// Vector operations of the kernels: partial loads and stores, reductions, exponential.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/vector.h"

namespace specdec {

#define SPECDEC_INLINE inline __attribute__((always_inline))

constexpr int64_t ceil_div(int64_t count, int64_t by) { return (count + by - 1) / by; }

constexpr int64_t round_up(int64_t count, int64_t step) { return ceil_div(count, step) * step; }

SPECDEC_INLINE Floats load(const float* from) { return load<Floats>(from); }

// Load the first `count` lanes; the others are zero.
SPECDEC_INLINE Floats load_partial(const float* from, int64_t count) {
  Floats value = {};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

SPECDEC_INLINE void store_partial(float* to, Floats value, int64_t count) {
  std::memcpy(to, &value, count * sizeof(float));
}

SPECDEC_INLINE Floats broadcast(float value) { return value - Floats{}; }

// Combine all lanes pairwise, halves first, in one fixed order.
template <class Combine>
SPECDEC_INLINE float reduce_lanes(Floats value, Combine combine) {
  float part[kLanes];
  store(part, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) part[lane] = combine(part[lane], part[lane + width]);
  }
  return part[0];
}

SPECDEC_INLINE float reduce_sum(Floats value) {
  return reduce_lanes(value, [](float a, float b) { return a + b; });
}

SPECDEC_INLINE float reduce_max(Floats value) {
  return reduce_lanes(value, [](float a, float b) { return b > a ? b : a; });
}

SPECDEC_INLINE Floats vec_max(Floats a, Floats b) { return a > b ? a : b; }

// Return e^x to about 1 ulp: e^x = 2^n e^r with |r| <= ln(2) / 2, and a minimax polynomial of e^r
// (Cephes' coefficients). The result is 0 below -87, e^88 above 88, and NaN for NaN.
SPECDEC_INLINE Floats vec_exp(Floats x) {
  const Floats lowest = broadcast(-87.0f), highest = broadcast(88.0f);
  const Floats clamped = x < lowest ? lowest : (x > highest ? highest : x);
  // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits of the sum.
  const Floats rounder = broadcast(12582912.0f);
  const Floats shifted = clamped * 1.44269504088896341f + rounder;
  const Floats n = shifted - rounder;
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Ints exponent = ((Ints)shifted - (Ints)rounder + 127) << 23;
  const Floats result = p * (Floats)exponent;
  return x < lowest ? Floats{} : result;
}

SPECDEC_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + vec_exp(-x)); }

// Return tanh(x) to about 1e-7.
SPECDEC_INLINE Floats vec_tanh(Floats x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

}  // namespace specdec
