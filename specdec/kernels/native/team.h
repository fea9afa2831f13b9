// The threads that run one kernel together, inside one OpenMP parallel region.
#pragma once

#include <omp.h>

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

  // Each thread has count_of(thread) things to do. This one does its own in order, and then those
  // that others have left, from their end: so all come to an end together, also where one has lost
  // its core to another process. Calls visit(owner, index). Once between two barriers.
  template <typename CountOf, typename Visit>
  void hand_out(CountOf count_of, Visit visit) const {
    if (size == 1) {
      const int64_t count = count_of(index);
      for (int64_t thing = 0; thing < count; ++thing) visit(index, thing);
      return;
    }
    for (int64_t turn = 0; turn < size; ++turn) {
      const int64_t owner = (index + turn) % size, count = count_of(owner);
      int64_t thing;
      while ((thing = meeting->take(owner, count, turn > 0)) >= 0) visit(owner, thing);
    }
  }

  // Waits until every thread is here; all that they wrote before is then seen by all.
  void barrier() const {
    if (size > 1) meeting->wait(index, size);
  }
};

// Calls work(team) on `num_threads` threads and returns when all are done.
template <typename Work>
void run_team(int num_threads, const Work& work) {
  Meeting meeting(num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = {omp_get_thread_num(), omp_get_num_threads(), &meeting};
    work(team);
    team.barrier();  // OpenMP has one of its own here, at which nobody should wait for long
  }
}

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))
