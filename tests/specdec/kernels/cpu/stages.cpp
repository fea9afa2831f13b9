// Runs threads through random stages, with random delays, and counts errors.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "threads/thread_team.h"

namespace {

// Pseudo-random number (the finalizer of splitmix64).
uint64_t splitmix64(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Tasks of each thread in one stage, and how often each task ran.
struct Stage {
  bool has_barrier;  // all threads wait at a barrier before the stage
  std::vector<int64_t> counts;
  std::vector<std::vector<int>> num_runs;

  Stage(uint64_t seed, int64_t num_threads) : has_barrier(splitmix64(seed) % 8 == 0) {
    const bool is_empty = splitmix64(seed + 1) % 16 == 0;
    for (int64_t thread = 0; thread < num_threads; ++thread) {
      counts.push_back(is_empty ? 0 : splitmix64(seed + 2 + thread) % 4);
      num_runs.emplace_back(counts.back());
    }
  }

  int64_t total() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

  bool is_done() const {
    return std::all_of(num_runs.begin(), num_runs.end(), [](const std::vector<int>& own) {
      return std::all_of(own.begin(), own.end(), [](int times) { return times == 1; });
    });
  }
};

void delay_rarely(uint64_t seed) {
  if (splitmix64(seed) % 64 == 0) usleep(100);
}

}  // namespace

// Return how often a stage was not done when a thread left it or started the next one; -1 where
// OpenMP started fewer threads than requested.
SPECDEC_EXPORT int64_t count_faults(int32_t num_threads, int64_t num_stages, uint64_t seed) {
  std::vector<Stage> stages;
  for (int64_t i = 0; i < num_stages; ++i) stages.emplace_back(splitmix64(seed + i), num_threads);
  std::atomic<int64_t> faults{0};
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) {
    if (team.size != num_threads) {
      faults = -1;
      return;
    }
    for (int64_t i = 0; i < num_stages; ++i) {
      Stage& stage = stages[i];
      delay_rarely(seed + i * num_threads + team.index);
      if (stage.has_barrier) team.barrier();
      team.parallel_tasks(
          stage.total(), [&](int64_t owner) { return stage.counts[owner]; },
          [&](int64_t owner, int64_t index) {
            if (i > 0 && !stages[i - 1].is_done()) ++faults;
            delay_rarely(seed + i * num_threads * 4 + owner * 4 + index);
            ++stage.num_runs[owner][index];
          });
      if (!stage.is_done()) ++faults;
    }
  });
  return faults;
}
