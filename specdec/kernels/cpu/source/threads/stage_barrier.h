// Work-stealing barrier for the threads of one kernel.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "threads/spin_wait.h"

namespace specdec {

struct Range {
  int64_t begin, end;
};

// Work-stealing barrier: divides the tasks of each stage over the threads and ends the stage when
// all tasks are done.
//
// A thread runs its own tasks, then steals the remaining tasks of other threads, and then waits
// until the tasks of the stage are done, not until the threads have arrived. A thread that was
// descheduled delays the stage only by the task it is running, and skips the stages that are done
// when it resumes.
//
// Threads may run on cores without a shared cache, where moving a cache line takes 200 ns, as long
// as many stages. To limit that traffic, threads wait on a single counter of completed tasks, which
// only grows and to which a thread adds once in most stages, and a thread looks for tasks to steal
// only after a short spin.
//
// A waiting thread spins for 50 us, which is nearly always enough, and then sleeps on a futex.
// OpenMP's barrier spins for about 15 ms: on an oversubscribed machine that keeps the awaited
// thread from running, at each of the about 300 stages of a forward pass.
class StageBarrier {
 public:
  static constexpr int kCountBits = 24;
  static constexpr int64_t kMaxTasks = (int64_t{1} << kCountBits) - 1;  // in one stage

  explicit StageBarrier(int64_t size) : threads_(size) {}

  // Move thread `index` to the next stage, of `total` tasks; return whether the stage is still
  // open.
  bool begin_stage(int64_t index, int64_t total) {
    ThreadState& state = threads_[index];
    ++state.stage;
    state.end += static_cast<uint32_t>(total);
    return !is_stage_done(index);
  }

  // Return whether all tasks of the current stage of thread `index` are done and their writes
  // visible to it.
  bool is_stage_done(int64_t index) const {
    return has_reached(num_done_.load(std::memory_order_acquire), threads_[index].end);
  }

  // Claim one of the `count` tasks of `owner` for thread `index` in its current stage: the first
  // unclaimed one for the owner, the last one for a thief. Return its index among the owner's
  // tasks, or -1 when none is left.
  int64_t claim_task(int64_t index, int64_t owner, int64_t count) {
    const uint64_t unclaimed = uint64_t{threads_[index].stage} << kStageShift;
    std::atomic<uint64_t>& claimed = threads_[owner].claimed;
    // The thread that wrote this word saw its stage open; acquiring the word makes that visible
    // here too.
    uint64_t seen = claimed.load(std::memory_order_acquire), now;
    int64_t num_front, num_back;  // tasks claimed at either end
    do {
      now = seen;
      if (seen >> kStageShift != unclaimed >> kStageShift) {
        // The word belongs to another stage. If the current stage is done, no task is left. If it
        // ends before the compare-exchange, another thread has changed the word, and the exchange
        // fails.
        if (is_stage_done(index)) return -1;
        now = unclaimed;
      }
      num_front = now & kCountMask, num_back = now >> kCountBits & kCountMask;
      if (num_front + num_back >= count) return -1;
      now += owner == index ? 1 : uint64_t{1} << kCountBits;
    } while (!claimed.compare_exchange_weak(seen, now, std::memory_order_acq_rel,
                                            std::memory_order_acquire));
    return owner == index ? num_front : count - 1 - num_back;
  }

  // Record that thread `index` completed `count` tasks of its stage, and publish what it wrote for
  // them to all threads that see the stage as done; return whether the stage is done.
  bool complete_tasks(int64_t index, int64_t count) {
    const auto added = static_cast<uint32_t>(count);
    const uint32_t before = num_done_.fetch_add(added, std::memory_order_seq_cst);
    if (before + added != threads_[index].end) return false;
    if (num_sleepers_.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &num_done_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
    return true;
  }

  // Spin shortly, for less time than most tasks take, for the end of the stage of thread `index`;
  // return whether it is done.
  bool spin_briefly(int64_t index) const {
    return spin_checks(kBriefChecks, [&] { return is_stage_done(index); });
  }

  // Wait for the end of the stage of thread `index`.
  void wait(int64_t index) {
    if (spin_for(kSpinTime, kChecksPerYield, [&] { return is_stage_done(index); })) return;
    // No wake-up is lost: either the last thread sees the sleeper, or the futex call sees that the
    // word has changed.
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t end = threads_[index].end;
    uint32_t num_done;
    while (!has_reached(num_done = num_done_.load(std::memory_order_seq_cst), end)) {
      syscall(SYS_futex, &num_done_, FUTEX_WAIT_PRIVATE, num_done, nullptr, nullptr, 0);
    }
    num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr auto kSpinTime = std::chrono::microseconds(50);
  static constexpr int kChecksPerYield = 64, kBriefChecks = 20;
  static constexpr int kStageShift = 2 * kCountBits;
  static constexpr uint64_t kCountMask = kMaxTasks;

  struct ThreadState {
    // Tasks claimed at the front, tasks claimed at the back, and the low 16 bits of the stage
    // number. Those bits repeat only after more stages than a forward pass has.
    alignas(128) std::atomic<uint64_t> claimed{0};
    // Current stage, and the value of num_done_ at which that stage and all before it are done.
    alignas(128) uint32_t stage = 0;
    uint32_t end = 0;
  };

  // Completed tasks of all stages. Wraps around, so a thread must not lag by 2^31 tasks.
  alignas(128) std::atomic<uint32_t> num_done_{0};
  alignas(128) std::atomic<uint32_t> num_sleepers_{0};
  alignas(128) std::vector<ThreadState> threads_;
};

}  // namespace specdec
