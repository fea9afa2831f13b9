// Collectives of the tensor-parallel ranks of one node, through memory that they share.
#pragma once

#include <cstdint>

#include "team.h"

namespace specdec {

struct Reducer;  // a rank's view of the shared memory; SharedMemory.reducer in Python

// Sums data [count] over the ranks, in place, in the order of the ranks: the same bits on each.
// Every thread of the team calls it, and every rank with the same count. It begins and ends with a
// barrier: `data` need not be complete when a thread calls, and is when it returns. False, on every
// thread, once a peer has ended or has not come within the reducer's timeout; `data` is then
// undefined and the reducer of no further use; SharedMemory.check says why.
bool all_reduce(Reducer* reducer, float* data, int64_t count, Team team);

// Copies own [bytes] of every rank to all [size, bytes], in the same way.
bool all_gather(Reducer* reducer, const void* own, int64_t bytes, void* all, Team team);

int64_t num_ranks(const Reducer* reducer);

}  // namespace specdec
