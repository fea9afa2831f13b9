// GCC vector extensions for loops that compilers do not vectorize: reductions, whose order is then
// the same on every machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace specdec::sampling {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kFloatLanes = 16, kDoubleLanes = 8;
typedef float FloatLanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));
typedef double DoubleLanes __attribute__((vector_size(64)));
typedef int64_t LongLanes __attribute__((vector_size(64)));

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Lanes, typename T>
inline Lanes load(const T* values) {
  Lanes lanes;
  std::memcpy(&lanes, values, sizeof lanes);
  return lanes;
}

inline FloatLanes load_floats(const float* values) { return load<FloatLanes>(values); }

inline FloatLanes load_floats(const uint16_t* bfloat16) {
  typedef uint16_t HalfLanes __attribute__((vector_size(32)));
  const auto halves = load<HalfLanes>(bfloat16);
  return bits_of<FloatLanes>(__builtin_convertvector(halves, WordLanes) << 16);
}

inline DoubleLanes load_doubles(const float* values) {
  typedef float HalfLanes __attribute__((vector_size(32)));
  return __builtin_convertvector(load<HalfLanes>(values), DoubleLanes);
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

// Return exp(x) for x <= 0 with a relative error below 3e-16; about 1e-304 where that is larger.
inline DoubleLanes exponential(DoubleLanes x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer in the lowest bits
  x = x > -700.0 ? x : DoubleLanes{} - 700.0;
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
