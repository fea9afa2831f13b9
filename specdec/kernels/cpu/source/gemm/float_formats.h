// Floating-point weight formats of the GEMM micro-kernel, which processes a panel step by step.
//
// Each format defines the types of a weight (`Element`) and of an activation (`Input`), and the
// number of adjacent inputs of one output (`kInputs`), which make up a step. A step consists of
// kTerms vectors of products for the same outputs, which are added to the accumulators in order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "gemm/format_convert.h"
#include "gemm/packed_layout.h"

namespace specdec {

// Base of the formats whose weights are multiplied one by one, as float32.
struct SingleWeights {
  using Input = float;
  static constexpr int kInputs = 1, kTerms = 1;

  static SPECDEC_INLINE Floats input(const float* step, int) { return broadcast(*step); }
  static SPECDEC_INLINE Floats add_product(Floats sums, Floats weights, Floats input) {
    return sums + weights * input;
  }
};

struct Float32 : SingleWeights {
  using Element = float;

  static SPECDEC_INLINE Floats weights(const float* step, int) { return load(step); }
};

// Weights are stored in pairs of inputs: one instruction converts each of a pair to float32.
struct ShortFloat32 : SingleWeights {
  using Element = uint16_t;
  static constexpr int kInputs = inputs_per_step(Format::kShortFloat32), kTerms = 2;

  static SPECDEC_INLINE Floats weights(const uint16_t* step, int term) {
    Bits pairs = load<Bits>(step);
    pin_register(pairs);
    return (Floats)(term == 0 ? pairs << 16 : pairs & 0xffff0000);
  }
  static SPECDEC_INLINE Floats input(const float* step, int term) { return broadcast(step[term]); }
};

struct Float16 : SingleWeights {
  using Element = uint16_t;

  static SPECDEC_INLINE Floats weights(const uint16_t* step, int) {
    return FormatTraits<Format::kFloat16>::to_float(load<Halves>(step));
  }
};

// Activations are rounded to bfloat16 too, so products are exact in float32. The second product of
// a pair is added first, each with one rounding, as the instruction vdpbf16ps does; results are the
// same bits on processors without it. (The instruction flushes numbers below 2^-126 to zero.)
struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kInputs = inputs_per_step(Format::kBFloat16);

#if defined(__AVX512BF16__)
  using Input = uint16_t;
  static constexpr int kTerms = 1;

  static SPECDEC_INLINE Floats weights(const uint16_t* step, int) { return load<Floats>(step); }
  static SPECDEC_INLINE Floats input(const uint16_t* step, int) {
    uint32_t pair;
    std::memcpy(&pair, step, sizeof(pair));
    return (Floats)(pair - Bits{});
  }
  static SPECDEC_INLINE Floats add_product(Floats sums, Floats weights, Floats input) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)input);
  }
  static SPECDEC_INLINE uint16_t round(float value) {
    return FormatTraits<Format::kBFloat16>::from_float(value);
  }
#else
  using Input = float;
  static constexpr int kTerms = 2;

  static SPECDEC_INLINE Floats weights(const uint16_t* step, int term) {
    Bits pairs = load<Bits>(step);
    pin_register(pairs);
    return (Floats)(term == 0 ? pairs & 0xffff0000 : pairs << 16);
  }
  static SPECDEC_INLINE Floats input(const float* step, int term) {
    return broadcast(step[1 - term]);
  }
  static SPECDEC_INLINE Floats add_product(Floats sums, Floats weights, Floats input) {
    return SingleWeights::add_product(sums, weights, input);
  }
  static SPECDEC_INLINE float round(float value) {
    const uint32_t bits = uint32_t(FormatTraits<Format::kBFloat16>::from_float(value)) << 16;
    float rounded;
    std::memcpy(&rounded, &bits, sizeof(rounded));
    return rounded;
  }
#endif
};

}  // namespace specdec
