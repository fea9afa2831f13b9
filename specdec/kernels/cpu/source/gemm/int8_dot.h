// Dot products of four unsigned and four signed bytes, as the instruction vpdpbusd computes them.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/vector.h"

namespace specdec {

#if defined(__AVX512VNNI__)

// Return, in each lane, sums + the dot product of four `weights` (unsigned) and four `values`
// (signed), modulo 2^32.
inline Ints dot_accumulate(Ints sums, Ints weights, Ints values) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)values);
}

#elif defined(__AVXVNNI__) && !defined(__AVX512F__)

inline Ints dot_accumulate(Ints sums, Ints weights, Ints values) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)values);
}

#else

using Shorts = int16_t __attribute__((vector_size(kVectorBytes)));
using Bytes = uint16_t __attribute__((vector_size(kVectorBytes)));  // two bytes in each 16-bit lane

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

inline Ints dot_accumulate(Ints sums, Ints weights, Ints values) {
  const Bytes bytes = (Bytes)weights;
  const Shorts signs = (Shorts)values;
  const Bits even = dot_pairs((Shorts)(bytes & 0xff), (Shorts)((Bytes)signs << 8) >> 8);
  const Bits odd = dot_pairs((Shorts)(bytes >> 8), signs >> 8);
  return (Ints)((Bits)sums + even + odd);
}

#endif

}  // namespace specdec
