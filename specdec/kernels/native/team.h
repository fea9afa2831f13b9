// The threads that run one kernel together, inside one OpenMP parallel region.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "meeting.h"

namespace specdec {

struct Team {
  int64_t index, size;
  Meeting* meeting = nullptr;  // where they wait for each other

  // This thread's part of `count` things; the parts differ by one at most.
  Range share(int64_t count) const {
    return {index * count / size, (index + 1) * count / size};
  }

  // Divides `count` things among the threads as they come, and calls visit(part) for each part that
  // falls to this one; a part is a multiple of `unit`, or the last. Once between two barriers.
  template <typename Visit>
  void hand_out(int64_t count, int64_t unit, Visit visit) const {
    if (size == 1) return visit(Range{0, count});
    for (Range part; (part = meeting->take(count, unit, size)).begin < part.end;) visit(part);
  }

  // Waits until every thread is here; all that they wrote before is then seen by all.
  void barrier() const {
    if (size > 1) meeting->wait(size);
  }
};

// Calls work(team) on `num_threads` threads and returns when all are done.
template <typename Work>
void run_team(int num_threads, const Work& work) {
  Meeting meeting;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = {omp_get_thread_num(), omp_get_num_threads(), &meeting};
    work(team);
    team.barrier();  // OpenMP has one of its own here, at which nobody should wait for long
  }
}

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))
