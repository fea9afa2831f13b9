// GCC vector extensions for loops that compilers do not vectorize.
//
// GCC compares the lanes of a vector that is wider than the processor's one by one, so compared
// vectors have the processor's width, or the 32 bytes of AVX2.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "base/vector.h"

namespace specdec::sampling {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// For results that do not depend on the order of lanes.
constexpr int64_t kFloatLanes = kLanes;
using FloatLanes = Floats;
using IntLanes = Ints;
using WordLanes = Bits;

// For sums, whose order is the same on every machine, and for the numbers that enter them.
constexpr int64_t kDoubleLanes = 8;
typedef double DoubleLanes __attribute__((vector_size(64)));
typedef int64_t LongLanes __attribute__((vector_size(64)));
typedef float ScoreLanes __attribute__((vector_size(32)));

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline FloatLanes load_floats(const float* values) { return load<FloatLanes>(values); }

inline FloatLanes load_floats(const uint16_t* bfloat16) {
  return bits_of<FloatLanes>(__builtin_convertvector(load<Halves>(bfloat16), WordLanes) << 16);
}

inline float max_of(FloatLanes lanes) {
  float best = lanes[0];
  for (int64_t i = 1; i < kFloatLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

template <typename Lanes>
inline double sum_of(Lanes lanes) {
  double sum = 0.0;
  for (int64_t i = 0; i < kDoubleLanes; ++i) sum += lanes[i];
  return sum;
}

inline bool any(IntLanes lanes) {
  int32_t bits = 0;
  for (int64_t i = 0; i < kFloatLanes; ++i) bits |= lanes[i];
  return bits != 0;
}

// Return exp(score) for scores <= 0 with a relative error below 3e-16; about 1e-304 where that is
// larger.
inline DoubleLanes exponential(ScoreLanes scores) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer in the lowest bits
  scores = scores > -700.0f ? scores : ScoreLanes{} - 700.0f;
  const DoubleLanes x = __builtin_convertvector(scores, DoubleLanes);
  const DoubleLanes shifted = x * 0x1.71547652b82fep0 + kShift;
  const DoubleLanes power = shifted - kShift;
  const DoubleLanes r = (x - power * 0x1.62e42fefa38p-1) - power * 0x1.ef35793c7673p-45;
  DoubleLanes sum = r * (1.0 / 6227020800) + 1.0 / 479001600;  // Taylor series, |r| <= log(2) / 2
  sum = sum * r + 1.0 / 39916800;
  sum = sum * r + 1.0 / 3628800;
  sum = sum * r + 1.0 / 362880;
  sum = sum * r + 1.0 / 40320;
  sum = sum * r + 1.0 / 5040;
  sum = sum * r + 1.0 / 720;
  sum = sum * r + 1.0 / 120;
  sum = sum * r + 1.0 / 24;
  sum = sum * r + 1.0 / 6;
  sum = sum * r + 1.0 / 2;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  return sum * bits_of<DoubleLanes>((bits_of<LongLanes>(shifted) + 1023) << 52);
}

// Return log(x) for positive normal x with an error below 1e-6 * max(1, log(x)).
inline FloatLanes approx_log(FloatLanes x) {
  constexpr int32_t kTwoThirds = 0x3f2aaaab;  // puts the mantissa in [2/3, 4/3)
  const IntLanes bits = bits_of<IntLanes>(x) - kTwoThirds;
  const FloatLanes power = __builtin_convertvector(bits >> 23, FloatLanes);
  const FloatLanes r = bits_of<FloatLanes>((bits & 0x7fffff) + kTwoThirds) - 1.0f;
  FloatLanes sum = r * 0.17111227f - 0.19407857f;  // Chebyshev interpolation of log(1 + r) / r
  sum = sum * r + 0.1979503f;
  sum = sum * r - 0.24841635f;
  sum = sum * r + 0.33337989f;
  sum = sum * r - 0.50002243f;
  sum = sum * r + 0.99999984f;
  return sum * r + power * 0.69314718f;
}

}  // namespace specdec::sampling
