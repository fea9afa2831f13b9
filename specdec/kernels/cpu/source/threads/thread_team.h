// Threads that execute one kernel together, inside one OpenMP parallel region (parallel_for).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "threads/stage_barrier.h"

namespace specdec {

struct ThreadTeam {
  int64_t index, size;
  StageBarrier* stage_barrier = nullptr;  // shared by the team

  // Return this thread's contiguous share of `count` items; shares differ in length by at most one.
  Range share(int64_t count) const { return {index * count / size, (index + 1) * count / size}; }

  // Run a stage of `total` tasks, of which count_of(thread) belong to each thread, by calling
  // visit(owner, index). A thread runs its own tasks in order and then steals from the back of
  // other threads' tasks. Every thread of the team must call it; on return all tasks are done and
  // their writes visible.
  template <typename CountOf, typename Visit>
  void parallel_tasks(int64_t total, CountOf count_of, Visit visit) const {
    if (size == 1) {
      for (int64_t task = 0; task < total; ++task) visit(index, task);
      return;
    }
    assert(total <= StageBarrier::kMaxTasks);
    if (total == 0 || !stage_barrier->begin_stage(index, total)) return;
    for (int64_t turn = 0; turn < size; ++turn) {
      // Checking other threads' tasks moves their cache lines, and most threads are about to
      // finish.
      if (turn == 1 && stage_barrier->spin_briefly(index)) return;
      const int64_t num_done = run_tasks_of((index + turn) % size, count_of, visit);
      if (num_done > 0 && stage_barrier->complete_tasks(index, num_done)) return;
    }
    stage_barrier->wait(index);
  }

  // Run a stage of `count` tasks of equal cost: calls visit(index).
  template <typename Visit>
  void parallel_for(int64_t count, Visit visit) const {
    const auto share_of = [&](int64_t owner) { return ThreadTeam{owner, size}.share(count); };
    const auto count_of = [&](int64_t owner) {
      return share_of(owner).end - share_of(owner).begin;
    };
    parallel_tasks(count, count_of,
                   [&](int64_t owner, int64_t task) { visit(share_of(owner).begin + task); });
  }

  // Run a stage of many small tasks: calls visit(range) for a few contiguous ranges per thread.
  template <typename Visit>
  void parallel_for_ranges(int64_t count, Visit visit) const {
    const int64_t num_ranges = std::min(count, kRangesPerThread * size);
    parallel_for(num_ranges, [&](int64_t part) {
      visit(ThreadTeam{part, num_ranges}.share(count));
    });
  }

  // Wait until all threads have arrived.
  void barrier() const {
    if (size == 1) return;
    stage_barrier->begin_stage(index, size);
    if (!stage_barrier->complete_tasks(index, 1)) stage_barrier->wait(index);
  }

 private:
  static constexpr int64_t kRangesPerThread = 2;

  // Run the unclaimed tasks of `owner`; return how many this thread ran.
  template <typename CountOf, typename Visit>
  int64_t run_tasks_of(int64_t owner, CountOf count_of, Visit visit) const {
    const int64_t count = count_of(owner);
    if (count == 0) return 0;  // do not touch the cache line that its owner is about to use
    int64_t num_done = 0, task;
    while ((task = stage_barrier->claim_task(index, owner, count)) >= 0) {
      visit(owner, task);
      ++num_done;
    }
    return num_done;
  }
};

// Call work(team) on `num_threads` threads; return when all have finished.
template <typename Work>
void run_parallel(int num_threads, const Work& work) {
  StageBarrier stage_barrier(num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    const ThreadTeam team = {omp_get_thread_num(), omp_get_num_threads(), &stage_barrier};
    work(team);
    team.barrier();  // so that no thread waits long at OpenMP's implicit barrier
  }
}

// Call visit(index) for `count` tasks, in a parallel region created for this call.
template <typename Visit>
void parallel_for(int64_t count, int num_threads, const Visit& visit) {
  run_parallel(count > 1 ? num_threads : 1,
               [&](ThreadTeam team) { team.parallel_for(count, visit); });
}

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))
