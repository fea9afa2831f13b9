// Floating-point formats: how numbers in memory become floats, and floats such numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "matrix.h"

namespace specdec {

// How numbers of a format become floats: kLanes at a time, or fewer with zeros behind them.
template <Format>
struct Numbers;

template <>
struct Numbers<Format::kFloat32> {
  using Element = float;
  using Vector = Floats;
  static SPECDEC_INLINE Floats widen(Floats values) { return values; }
  static SPECDEC_INLINE float narrow(float value) { return value; }
};

template <>
struct Numbers<Format::kBFloat16> {
  using Element = uint16_t;
  using Vector = Halves;
  static SPECDEC_INLINE Floats widen(Halves bits) {
#if defined(__AVX512F__)  // by itself the compiler takes five instructions
    return (Floats)((Bits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits) << 16);
#else
    return (Floats)(__builtin_convertvector(bits, Bits) << 16);
#endif
  }
  // Rounds to nearest, ties to even; a NaN stays one.
  static SPECDEC_INLINE uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
};

template <>
struct Numbers<Format::kFloat16> {
  using Element = _Float16;
  using Vector = Halves;
#if defined(__AVX512F__)
  static SPECDEC_INLINE Floats widen(Halves bits) {
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
  }
#elif defined(__F16C__)
  static SPECDEC_INLINE Floats widen(Halves bits) { return (Floats)_mm256_cvtph_ps((__m128i)bits); }
#else
  // Moves exponent and fraction into place, and multiplies by 2^112, the difference of the biases.
  // What is not finite has all bits of the exponent set, here as there.
  static SPECDEC_INLINE Floats widen(Halves halves) {
    const Bits bits = __builtin_convertvector(halves, Bits);
    const Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    const Bits endless = (Bits)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Floats)((Bits)magnitude | endless | (bits & 0x8000) << 16);
  }
#endif
  static SPECDEC_INLINE _Float16 narrow(float value) { return _Float16(value); }
};

template <Format kFormat>
SPECDEC_INLINE Floats read(const typename Numbers<kFormat>::Element* from) {
  return Numbers<kFormat>::widen(load<typename Numbers<kFormat>::Vector>(from));
}

template <Format kFormat>
SPECDEC_INLINE Floats read_part(const typename Numbers<kFormat>::Element* from, int64_t count) {
  typename Numbers<kFormat>::Element part[kLanes] = {};
  std::memcpy(part, from, count * sizeof part[0]);
  return read<kFormat>(part);
}

// Calls `work` with the format of single numbers as a constant: those of kShortFloat32 are
// kBFloat16's.
template <typename Work>
SPECDEC_INLINE auto with_format(Format format, Work&& work) {
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

inline int64_t bytes_of(Format format) { return format == Format::kFloat32 ? 4 : 2; }

}  // namespace specdec
