// Paged KV cache of one layer, in the model's data type.
#pragma once

#include <cstdint>

#include "gemm/format_convert.h"

namespace specdec {

// One layer of the KV cache: [num_kv_heads, num_blocks, 2, block_size * head_dim]. A block stores
// its keys as [head_dim, block_size], so that the keys of neighbouring positions form a vector,
// followed by its values as [block_size, head_dim].
//
// With latent attention a block stores one row a token, [block_size, head_dim]: the key that all heads
// share, whose last dimensions are the value too.
//
// Extra blocks, which a pass has for itself, are in other memory with the same layout, and numbered
// from num_blocks on.
struct KvLayer {
  char* data;
  Format format;
  int64_t num_kv_heads, num_blocks, block_size, head_dim;
  char* extra_data = nullptr;
  int64_t num_extra_blocks = 0;
  int64_t latent_rank = 0;  // dimensions of a latent, which is the value; 0 without latents

  bool is_latent() const { return latent_rank > 0; }
  int64_t block_bytes() const {
    return (is_latent() ? 1 : 2) * block_size * head_dim * element_bytes(format);
  }
  int64_t num_bytes() const { return num_kv_heads * num_blocks * block_bytes(); }
  int64_t num_extra_bytes() const { return num_kv_heads * num_extra_blocks * block_bytes(); }

  char* keys(int64_t head, int64_t block) const {
    if (block < num_blocks) return data + (head * num_blocks + block) * block_bytes();
    return extra_data + (head * num_extra_blocks + block - num_blocks) * block_bytes();
  }
  char* values(int64_t head, int64_t block) const {
    const int64_t before = is_latent() ? head_dim - latent_rank : block_size * head_dim;
    return keys(head, block) + before * element_bytes(format);
  }

  void write_key(int64_t head, int64_t slot, const float* key) const {
    write(keys(head, slot / block_size), slot % block_size, block_size, key);
  }
  void write_value(int64_t head, int64_t slot, const float* value) const {
    write(values(head, slot / block_size), slot % block_size * head_dim, 1, value);
  }
  void write_latent(int64_t slot, const float* key) const {
    write(keys(0, slot / block_size), slot % block_size * head_dim, 1, key);
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
