// Sums over the tensor-parallel ranks of one node, through memory that they share.
#pragma once

#include <cstdint>

#include "team.h"

namespace specdec {

struct Reducer;  // a rank's view of the shared memory

// Sums data [count] over the ranks, in place, in the order of the ranks: the same bits on each.
// Every thread of the team calls it; `data` is complete at a barrier before and after. False once
// a peer has not come within the reducer's deadline; the reducer is then of no further use.
bool all_reduce(Reducer* reducer, float* data, int64_t count, Team team);

}  // namespace specdec
