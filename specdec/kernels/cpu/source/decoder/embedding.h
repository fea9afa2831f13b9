// Embeddings of tokens, in the layouts of `Embedding`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decoder/decoder.h"
#include "gemm/packed_layout.h"

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
    for (int64_t begin = 0; begin < size; begin += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, size - begin);
      Element own[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t input = begin + i;
        own[i] = elements[embedding.table ? row * size + input : layout.offset(row, input)];
      }
      store_partial(to + begin, load_as_float<format>(own), count);
    }
  });
}

}  // namespace specdec
