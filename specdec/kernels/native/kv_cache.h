// Keys and values of one layer, in the model's number format, block by block.
#pragma once

#include <algorithm>
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

// Calls `work` with one of the three floating formats as a constant.
template <typename Work>
SPECDEC_INLINE auto with_format(Format format, Work&& work) {
  switch (format) {
    case Format::kBFloat16:
      return work(std::integral_constant<Format, Format::kBFloat16>());
    case Format::kFloat16:
      return work(std::integral_constant<Format, Format::kFloat16>());
    default:
      return work(std::integral_constant<Format, Format::kFloat32>());
  }
}

inline int64_t bytes_of(Format format) { return format == Format::kFloat32 ? 4 : 2; }

// One layer of the pool: [num_kv_heads, num_blocks, 2, block_size * head_dim]. A block holds its
// keys dimension by dimension, [head_dim, block_size], so that those of neighbouring positions make
// a vector, and then its values position by position, [block_size, head_dim].
struct KvLayer {
  char* data;
  Format format;
  int64_t num_kv_heads, num_blocks, block_size, head_dim;

  int64_t num_bytes() const {
    return num_kv_heads * num_blocks * 2 * block_size * head_dim * bytes_of(format);
  }
  char* keys(int64_t head, int64_t block) const {
    const int64_t elements = 2 * block_size * head_dim;
    return data + (head * num_blocks + block) * elements * bytes_of(format);
  }
  char* values(int64_t head, int64_t block) const {
    return keys(head, block) + block_size * head_dim * bytes_of(format);
  }

  void write_key(int64_t head, int64_t slot, const float* key) const {
    write(keys(head, slot / block_size), slot % block_size, block_size, key);
  }
  void write_value(int64_t head, int64_t slot, const float* value) const {
    write(values(head, slot / block_size), slot % block_size * head_dim, 1, value);
  }

 private:
  void write(char* half_block, int64_t first, int64_t stride, const float* from) const {
    with_format(format, [&](auto constant) {
      using Kind = Numbers<constant.value>;
      auto* to = reinterpret_cast<typename Kind::Element*>(half_block) + first;
      for (int64_t d = 0; d < head_dim; ++d) to[d * stride] = Kind::narrow(from[d]);
    });
  }
};

}  // namespace specdec
