// Paged KV cache of one layer, in the model's data type.
#pragma once

#include <cstdint>

#include "format_convert.h"

namespace specdec {

// One layer of the KV cache: [num_kv_heads, num_blocks, 2, block_size * head_dim]. A block stores
// its keys as [head_dim, block_size], so that the keys of neighbouring positions form a vector,
// followed by its values as [block_size, head_dim].
//
// Extra blocks, which a pass has for itself, are in other memory with the same layout, and numbered
// from num_blocks on.
struct KvLayer {
  char* data;
  Format format;
  int64_t num_kv_heads, num_blocks, block_size, head_dim;
  char* extra_data = nullptr;
  int64_t num_extra_blocks = 0;

  int64_t block_bytes() const { return 2 * block_size * head_dim * element_bytes(format); }
  int64_t num_bytes() const { return num_kv_heads * num_blocks * block_bytes(); }
  int64_t num_extra_bytes() const { return num_kv_heads * num_extra_blocks * block_bytes(); }

  char* keys(int64_t head, int64_t block) const {
    if (block < num_blocks) return data + (head * num_blocks + block) * block_bytes();
    return extra_data + (head * num_extra_blocks + block - num_blocks) * block_bytes();
  }
  char* values(int64_t head, int64_t block) const {
    return keys(head, block) + block_size * head_dim * element_bytes(format);
  }

  void write_key(int64_t head, int64_t slot, const float* key) const {
    write(keys(head, slot / block_size), slot % block_size, block_size, key);
  }
  void write_value(int64_t head, int64_t slot, const float* value) const {
    write(values(head, slot / block_size), slot % block_size * head_dim, 1, value);
  }

 private:
  // Inlined, so that the values, which are contiguous, are stored as vectors.
  SPECDEC_INLINE void write(char* half_block, int64_t first, int64_t stride,
                            const float* from) const {
    dispatch_format(format, [&](auto constant) {
      using Kind = FormatTraits<constant.value>;
      auto* to = reinterpret_cast<typename Kind::Element*>(half_block) + first;
      for (int64_t d = 0; d < head_dim; ++d) to[d * stride] = Kind::from_float(from[d]);
    });
  }
};

}  // namespace specdec
