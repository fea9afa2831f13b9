// Input of one forward pass: a flat batch of tokens over a paged KV cache
// (`specdec/kernels/forward_batch.py`).
#pragma once

#include <cstdint>

namespace specdec {

// Sequence i owns tokens query_starts[i] to query_starts[i + 1], the last of its context_lens[i]
// tokens. block_tables[i] lists the KV blocks of the sequence in order.
struct Batch {
  int64_t num_tokens, num_sequences, block_size;
  const int32_t* input_ids;            // [num_tokens]
  const int32_t* query_starts;         // [num_sequences + 1]
  const int32_t* context_lens;         // [num_sequences]
  const int32_t* const* block_tables;  // [num_sequences]

  int64_t slot(int64_t sequence, int64_t position) const {
    const int64_t block = block_tables[sequence][position / block_size];
    return block * block_size + position % block_size;
  }
};

}  // namespace specdec
