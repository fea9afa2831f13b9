// The gated delta rule (Yang et al. 2025, arXiv 2412.06464), by its recurrence.
//
// Without the delta it is the state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).
//
// The memory S of a head is [key_dim, value_dim]. A token decays it by a factor a, and replaces a
// share b of what it has for the key k by the value v; then the query q reads it:
//
//   S <- a S;  S <- S + k (b (v - k S));  o = q S
//
// Without the delta the second step is S <- S + k (b v). The columns of S do not depend on each
// other: a few of them stay in the first-level cache for all tokens of a row.
#pragma once

#include <cstdint>

#include "recurrence/input_rows.h"
#include "recurrence/tree_order.h"

namespace specdec {

constexpr int kMemoryVectors = 4;  // columns of a memory that run together, in vectors

// Numbers of a token in one head.
struct TokenScalars {
  float decay, share;             // a and b
  float query_scale, key_scale;   // of the query and the key of its input
};

// The tokens of one sequence that run through one head.
struct HeadRun {
  bool has_delta;
  int64_t key_dim, value_dim;
  InputRows rows;
  int64_t first;                    // of `rows` that runs
  int64_t num_run, num_committed;   // rows; those after which the memory is committed, at least 1
  int64_t num_replayed;             // rows without an output
  const TreeOrder* tree;            // of the last rows, after the committed ones
  int64_t query, key, value;        // first columns in a row
  const TokenScalars* scalars;      // [num_run]
  float* memory;                    // [key_dim, value_dim], becomes the committed one
  float* scratch;                   // [states, key_dim, kMemoryVectors * kLanes], at least one
  float* outputs;                   // [num_run - num_replayed, value_dim]
  int64_t output_stride;
};

void run_head(const HeadRun& run);

}  // namespace specdec
