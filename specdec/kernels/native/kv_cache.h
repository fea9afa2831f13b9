// Keys and values of one layer, in the model's number format, slot by slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "matrix.h"
#include "lanes.h"

namespace specdec {

using Float16s = _Float16 __attribute__((vector_size(kLanes * sizeof(_Float16))));

template <typename Vector>
SPECDEC_INLINE Vector bits_at(const void* from, int64_t count) {
  Vector bits = {};
  if (count >= kLanes) {
    std::memcpy(&bits, from, sizeof bits);
  } else {
    std::memcpy(&bits, from, count * sizeof bits[0]);
  }
  return bits;
}

// Up to kLanes of the numbers from `index` on, `count` of them, the other lanes zero. The array is
// in one of the three floating formats.
SPECDEC_INLINE Floats read_lanes(Format format, const void* array, int64_t index, int64_t count) {
  switch (format) {
    case Format::kBFloat16: {
      const auto bits = bits_at<Halves>(static_cast<const uint16_t*>(array) + index, count);
      return (Floats)(__builtin_convertvector(bits, Bits) << 16);
    }
    case Format::kFloat16: {
      const auto bits = bits_at<Float16s>(static_cast<const _Float16*>(array) + index, count);
      return __builtin_convertvector(bits, Floats);
    }
    default:
      return bits_at<Floats>(static_cast<const float*>(array) + index, count);
  }
}

// Rounds to nearest, ties to even; a NaN stays one.
SPECDEC_INLINE uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void write_floats(Format format, void* array, int64_t index, int64_t count,
                         const float* from) {
  switch (format) {
    case Format::kBFloat16: {
      auto* to = static_cast<uint16_t*>(array) + index;
      for (int64_t i = 0; i < count; ++i) to[i] = narrowed(from[i]);
      return;
    }
    case Format::kFloat16: {
      auto* to = static_cast<_Float16*>(array) + index;
      for (int64_t i = 0; i < count; ++i) to[i] = _Float16(from[i]);
      return;
    }
    default:
      std::memcpy(static_cast<float*>(array) + index, from, count * sizeof(float));
  }
}

// `count` numbers of an array in one of the floating formats, each `stride` after the last.
inline void read_floats(Format format, const void* array, int64_t index, int64_t stride,
                        int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = read_lanes(format, array, index + i * stride, 1)[0];
  }
}

inline int64_t bytes_of(Format format) { return format == Format::kFloat32 ? 4 : 2; }

// One layer of the pool: [num_slots, 2, num_kv_heads, head_dim], keys before values.
struct KvLayer {
  void* data;
  Format format;
  int64_t num_kv_heads, head_dim;

  int64_t key_at(int64_t slot, int64_t head) const {
    return (slot * 2 * num_kv_heads + head) * head_dim;
  }
  int64_t value_at(int64_t slot, int64_t head) const {
    return ((slot * 2 + 1) * num_kv_heads + head) * head_dim;
  }
};

}  // namespace specdec
