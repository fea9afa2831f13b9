// Causal convolution of each channel over the last few inputs of a sequence.
#pragma once

#include <cstdint>

#include "recurrence/input_rows.h"
#include "recurrence/recurrence.h"
#include "recurrence/tree_order.h"
#include "threads/stage_barrier.h"

namespace specdec {

constexpr int64_t kMaxTaps = 64;  // as `specdec/models/config` checks

// Replace some channels of `rows` from row `begin` up to `end` by their convolution; with a memory,
// by its silu. Each row before `begin` that is read stays as it is. tree: of rows that are counted
// after the window. first_column: of the channels in a row.
void convolve(const RecurrentShape& shape, const RecurrentWeights& weights, const InputRows& rows,
              int64_t begin, int64_t end, const TreeOrder& tree, Range channels,
              int64_t first_column);

}  // namespace specdec
