// Conversions between floating-point storage formats and float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/simd_math.h"
#include "gemm/matrix.h"

namespace specdec {

// A float of 16 bits, for conversions alone. GCC before 13 has no _Float16 in C++ for ARM; its
// __fp16 differs in arithmetic, which is in 32 bits.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using StoredFloat16 = __fp16;
#else
using StoredFloat16 = _Float16;
#endif

// Conversion of a storage format: to float32 for kLanes values at a time, from float32 one by one.
template <Format>
struct FormatTraits;

template <>
struct FormatTraits<Format::kFloat32> {
  using Element = float;
  using Vector = Floats;
  static SPECDEC_INLINE Floats to_float(Floats values) { return values; }
  static SPECDEC_INLINE float from_float(float value) { return value; }
};

template <>
struct FormatTraits<Format::kBFloat16> {
  using Element = uint16_t;
  using Vector = Halves;
  static SPECDEC_INLINE Floats to_float(Halves bits) {
#if defined(__AVX512F__)  // the compiler's conversion takes five instructions
    return (Floats)((Bits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits) << 16);
#else
    return (Floats)(__builtin_convertvector(bits, Bits) << 16);
#endif
  }
  // Round to nearest, ties to even; NaN stays NaN.
  static SPECDEC_INLINE uint16_t from_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
};

template <>
struct FormatTraits<Format::kFloat16> {
  using Element = StoredFloat16;
  using Vector = Halves;
#if defined(__AVX512F__)
  static SPECDEC_INLINE Floats to_float(Halves bits) {
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
  }
#elif defined(__F16C__)
  static SPECDEC_INLINE Floats to_float(Halves bits) {
    return (Floats)_mm256_cvtph_ps((__m128i)bits);
  }
#else
  // Shift exponent and fraction into place and multiply by 2^112, the difference of the biases.
  // Infinities and NaN have all exponent bits set in both formats.
  static SPECDEC_INLINE Floats to_float(Halves halves) {
    const Bits bits = __builtin_convertvector(halves, Bits);
    const Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    const Bits non_finite = (Bits)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Floats)((Bits)magnitude | non_finite | (bits & 0x8000) << 16);
  }
#endif
  static SPECDEC_INLINE StoredFloat16 from_float(float value) { return StoredFloat16(value); }
};

template <Format kFormat>
SPECDEC_INLINE Floats load_as_float(const typename FormatTraits<kFormat>::Element* source) {
  return FormatTraits<kFormat>::to_float(load<typename FormatTraits<kFormat>::Vector>(source));
}

template <Format kFormat>
SPECDEC_INLINE Floats load_part_as_float(const typename FormatTraits<kFormat>::Element* source,
                                         int64_t count) {
  typename FormatTraits<kFormat>::Element padded[kLanes] = {};
  std::memcpy(padded, source, count * sizeof padded[0]);
  return load_as_float<kFormat>(padded);
}

// Call `work` with the format of single values as a compile-time constant; single values of
// kShortFloat32 are bfloat16.
template <typename Work>
SPECDEC_INLINE auto dispatch_format(Format format, Work&& work) {
  switch (format) {
    case Format::kBFloat16:
    case Format::kShortFloat32:
      return work(std::integral_constant<Format, Format::kBFloat16>());
    case Format::kFloat16:
      return work(std::integral_constant<Format, Format::kFloat16>());
    default:
      return work(std::integral_constant<Format, Format::kFloat32>());
  }
}

inline int64_t element_bytes(Format format) { return format == Format::kFloat32 ? 4 : 2; }

}  // namespace specdec
