// All-reduce and all-gather between the tensor-parallel ranks of one node, through shared memory.
#pragma once

#include <cstdint>

#include "threads/thread_team.h"

namespace specdec {

struct Communicator;  // one rank's view of the shared memory; SharedMemory.communicator in Python

// Sum data [count] over the ranks in place, in rank order, so that the result is the same bits on
// each rank. Every thread of the team calls it, and every rank with the same count. Contains a
// barrier at the start and at the end: `data` need not be complete when a thread calls, and is
// complete on return.
//
// Return false, on every thread, when a peer has ended or has not arrived within the communicator's
// timeout. `data` is then undefined and the communicator unusable; SharedMemory.check raises the
// cause.
bool all_reduce(Communicator* communicator, float* data, int64_t count, ThreadTeam team);

// Copy own [bytes] of every rank to all [size, bytes]; the same rules apply.
bool all_gather(Communicator* communicator, const void* own, int64_t bytes, void* all,
                ThreadTeam team);

int64_t num_ranks(const Communicator* communicator);

}  // namespace specdec
