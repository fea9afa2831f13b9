// Where the threads of one kernel divide its work, and wait for each other.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace specdec {

struct Range {
  int64_t begin, end;
};

// Stage by stage, each thread takes of the things that are to be done until none are left, and then
// waits until all are done. It does not wait for the other threads: one that has lost its core to
// another process holds up the stages by what it has begun alone, and passes over those that are
// done when it is back.
//
// Waiting threads stay awake for a moment, which nearly always is enough, and then sleep. OpenMP's
// stay awake for some 15 ms: where other processes want the cores, that keeps from running the very
// thread that is waited for, at each of the some 300 stages of a forward pass.
class Meeting {
 public:
  static constexpr int kCountBits = 24;
  static constexpr int64_t kMostThings = (int64_t{1} << kCountBits) - 1;  // of a stage

  explicit Meeting(int64_t size) : members_(size) {}

  // Whether the stage that thread `index` comes to is open; if it is over, the thread is past it.
  bool enter(int64_t index) {
    uint32_t& stage = members_[index].stage;
    if (stage_.load(std::memory_order_acquire) == stage) return true;
    ++stage;
    return false;
  }

  // Takes, for thread `index` in the stage that it is in, one of the `count` things that are
  // `owner`'s: the first that is left, or the last for another than the owner. Returns its place
  // among them, or -1 when none are left.
  int64_t take(int64_t index, int64_t owner, int64_t count) {
    const uint32_t stage = members_[index].stage;
    const uint64_t untaken = uint64_t{stage} << kStageShift;
    std::atomic<uint64_t>& taken = members_[owner].taken;
    // Whoever changed the word had seen its stage open: having seen that word, so has this thread.
    uint64_t seen = taken.load(std::memory_order_acquire), now;
    int64_t first, behind;  // how many were taken at either end
    do {
      now = seen;
      if (seen >> kStageShift != untaken >> kStageShift) {
        // Of another stage. If this one is over, nothing is left; and if it ends before the word is
        // exchanged, then somebody will have changed the word.
        if (stage_.load(std::memory_order_relaxed) != stage) return -1;
        now = untaken;
      }
      first = now & kCountMask, behind = now >> kCountBits & kCountMask;
      if (first + behind >= count) return -1;
      now += owner == index ? 1 : uint64_t{1} << kCountBits;
    } while (!taken.compare_exchange_weak(seen, now, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return owner == index ? first : count - 1 - behind;
  }

  // Thread `index` has done `count` of the stage's `total` things, and goes on to the next stage
  // once all are done; what was written for them is then seen by all.
  void finish(int64_t index, int64_t count, int64_t total) {
    const uint32_t stage = members_[index].stage++;
    if (count > 0 && done_.fetch_add(count, std::memory_order_acq_rel) + count == total) {
      done_.store(0, std::memory_order_relaxed);
      stage_.store(stage + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, &stage_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
      }
      return;
    }
    if (await_briefly(stage)) return;
    // No wake-up can be lost: either the last thread sees the sleeper, or the kernel sees that the
    // word has changed.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (stage_.load(std::memory_order_seq_cst) == stage) {
      syscall(SYS_futex, &stage_, FUTEX_WAIT_PRIVATE, stage, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr auto kAwake = std::chrono::microseconds(50);
  static constexpr int kChecksPerYield = 64;
  static constexpr int kStageShift = 2 * kCountBits;
  static constexpr uint64_t kCountMask = kMostThings;

  struct Member {
    // How many of the thread's things are taken at their beginning, how many at their end, and in
    // which stage: its last 16 bits, which come again after more stages than a pass has.
    alignas(128) std::atomic<uint64_t> taken{0};
    alignas(128) uint32_t stage = 0;  // where the thread is
  };

  alignas(128) std::atomic<uint32_t> stage_{0};  // that is open: all before it are done
  std::atomic<uint32_t> sleepers_{0};
  alignas(128) std::atomic<int64_t> done_{0};
  alignas(128) std::vector<Member> members_;

  bool await_briefly(uint32_t stage) const {
    const auto end = std::chrono::steady_clock::now() + kAwake;
    do {
      for (int i = 0; i < kChecksPerYield; ++i) {
        if (stage_.load(std::memory_order_acquire) != stage) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
      sched_yield();
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }
};

}  // namespace specdec
