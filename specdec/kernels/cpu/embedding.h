// Embeddings of tokens, in the layouts of `Embedding`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decoder.h"
#include "packed_layout.h"

namespace specdec {

// Copy the embedding of a token to `to` [size]; zeros if another rank has it.
inline void load_embedding(const Embedding& embedding, int64_t token, int64_t size, float* to) {
  const int64_t row = token - embedding.first_token;
  if (row < 0 || row >= embedding.num_tokens) {
    std::fill(to, to + size, 0.0f);
    return;
  }
  const PackedLayout layout(embedding.format, size);
  dispatch_format(embedding.format, [&](auto format) {
    using Element = typename FormatTraits<format>::Element;
    const auto* elements =
        static_cast<const Element*>(embedding.table ? embedding.table : embedding.packed);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t offset = embedding.table ? row * size + i : layout.offset(row, i);
      to[i] = load_part_as_float<format>(elements + offset, 1)[0];
    }
  });
}

}  // namespace specdec
