// Floating-point formats: how numbers in memory become floats, and floats such numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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
    return (Floats)(__builtin_convertvector(bits, Bits) << 16);
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
  using Vector = _Float16 __attribute__((vector_size(kLanes * sizeof(_Float16))));
  static SPECDEC_INLINE Floats widen(Vector values) {
    return __builtin_convertvector(values, Floats);
  }
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
