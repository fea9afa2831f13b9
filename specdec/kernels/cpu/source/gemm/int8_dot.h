// Products of unsigned 8-bit weights and quantized activations, a quad of four inputs at a time.
//
// The instruction vpdpbusd adds the products of a quad of bytes. Without it, bytes are extended to
// 16 bits and multiplied in pairs, so that an activation may have 16 bits as well.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/vector.h"

namespace specdec {

// Broadcast the 32 bits at `memory` to every lane.
inline Ints broadcast_bits(const void* memory) { return load<int32_t>(memory) - Ints{}; }

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))

constexpr bool kHasByteDot = true;

using QuantizedValue = int8_t;
using QuantizedVector = QuantizedValue __attribute__((vector_size(kLanes)));
using QuadWeights = Ints;  // a quad of one output in each lane
using QuadValues = Ints;   // the same quad in each lane

inline QuantizedVector in_quad_order(QuantizedVector values) { return values; }

inline QuadWeights unpack_weights(Ints weights) { return weights; }

inline QuadValues broadcast_quad(const QuantizedValue* quad) { return broadcast_bits(quad); }

// Return, in each lane, sums + the dot product of four weights and four values, modulo 2^32.
inline Ints dot_accumulate(Ints sums, QuadWeights weights, QuadValues values) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)values);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)values);
#endif
}

#else

constexpr bool kHasByteDot = false;

using QuantizedValue = int16_t;
using QuantizedVector = QuantizedValue __attribute__((vector_size(2 * kLanes)));
using Shorts = int16_t __attribute__((vector_size(kVectorBytes)));

struct QuadWeights {
  Shorts even, odd;  // inputs 0 and 2, and inputs 1 and 3, of one output in each 32-bit lane
};

struct QuadValues {
  Shorts even, odd;
};

// Return the values in the order 0, 2, 1, 3 of each quad.
inline QuantizedVector in_quad_order(QuantizedVector values) {
  using Quads = uint64_t __attribute__((vector_size(sizeof(values))));
  const Quads quads = (Quads)values;
  return (QuantizedVector)((quads & 0xffff00000000ffff) | (quads & 0xffff0000) << 16 |
                           (quads >> 16 & 0xffff0000));
}

inline QuadWeights unpack_weights(Ints weights) {
  using Bytes = uint16_t __attribute__((vector_size(kVectorBytes)));  // two in each 16-bit lane
#if defined(__AVX2__)
  asm("" : "+v"(weights));  // load them once: a second load from memory makes one row 13 % slower
#endif
  return {(Shorts)((Bytes)weights & 0xff), (Shorts)((Bytes)weights >> 8)};
}

inline QuadValues broadcast_quad(const QuantizedValue* quad) {
  return {(Shorts)broadcast_bits(quad), (Shorts)broadcast_bits(quad + 2)};
}

// Return, in each 32-bit lane, the sum of the products of its two 16-bit lanes.
inline Bits dot_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Bits)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Bits)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return (Bits)((x << 16 >> 16) * (y << 16 >> 16)) + (Bits)((x >> 16) * (y >> 16));
#endif
}

inline Ints dot_accumulate(Ints sums, QuadWeights weights, QuadValues values) {
  const Bits even = dot_pairs(weights.even, values.even);
  return (Ints)((Bits)sums + even + dot_pairs(weights.odd, values.odd));
}

#endif

}  // namespace specdec
