// States of the recurrent layers of a batch's sequences, as in `kernels/reference/state_pool.py`.
#pragma once

#include <cstdint>

#include "gemm/matrix.h"

namespace specdec {

// The tokens that a pass runs through the recurrent layers for one sequence: inputs of the slot
// that are replayed, then those of the batch, the first of which are known. num_kept: inputs of
// guesses, which the slot has after the pass.
struct StateSpan {
  int64_t slot, num_replayed, num_known, num_kept;

  // Return the number of inputs after which the memory is committed.
  int64_t num_committed() const { return num_replayed + num_known; }
};

// States of all recurrent layers. A slot has the last inputs before its committed position, then
// those of guesses after it.
struct StatePool {
  void* inputs;   // [layers, num_slots, slot_size, numbers of an input]
  float* memory;  // [layers, num_slots, num_heads, key_dim, value_dim]
  Format format;  // of the inputs
  int64_t num_slots, slot_size;
  const StateSpan* spans;  // [num_sequences]
};

}  // namespace specdec
