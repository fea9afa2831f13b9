// Sends threads through random stages, some of them late, and counts what goes wrong.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "thread_team.h"

namespace {

// A number that looks random (the last steps of splitmix64).
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// What each thread has to do, and how often each thing of each of them was done.
struct Stage {
  bool is_met;  // all threads meet before it
  std::vector<int64_t> counts;
  std::vector<std::vector<int>> visits;

  Stage(uint64_t seed, int64_t num_threads) : is_met(mixed(seed) % 8 == 0) {
    const bool is_empty = mixed(seed + 1) % 16 == 0;
    for (int64_t thread = 0; thread < num_threads; ++thread) {
      counts.push_back(is_empty ? 0 : mixed(seed + 2 + thread) % 4);
      visits.emplace_back(counts.back());
    }
  }

  int64_t total() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

  bool is_done() const {
    return std::all_of(visits.begin(), visits.end(), [](const std::vector<int>& own) {
      return std::all_of(own.begin(), own.end(), [](int times) { return times == 1; });
    });
  }
};

void nap_rarely(uint64_t seed) {
  if (mixed(seed) % 64 == 0) usleep(100);
}

}  // namespace

// How many stages were not done when a thread came out of them, or began the next; -1 where fewer
// threads came than were asked for.
SPECDEC_EXPORT int64_t count_faults(int32_t num_threads, int64_t num_stages, uint64_t seed) {
  std::vector<Stage> stages;
  for (int64_t i = 0; i < num_stages; ++i) stages.emplace_back(mixed(seed + i), num_threads);
  std::atomic<int64_t> faults{0};
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) {
    if (team.size != num_threads) {
      faults = -1;
      return;
    }
    for (int64_t i = 0; i < num_stages; ++i) {
      Stage& stage = stages[i];
      nap_rarely(seed + i * num_threads + team.index);
      if (stage.is_met) team.barrier();
      team.parallel_tasks(
          stage.total(), [&](int64_t owner) { return stage.counts[owner]; },
          [&](int64_t owner, int64_t index) {
            if (i > 0 && !stages[i - 1].is_done()) ++faults;
            nap_rarely(seed + i * num_threads * 4 + owner * 4 + index);
            ++stage.visits[owner][index];
          });
      if (!stage.is_done()) ++faults;
    }
  });
  return faults;
}
