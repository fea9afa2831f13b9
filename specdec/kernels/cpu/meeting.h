// Where the threads of one kernel divide its work, and wait for each other.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "waiting.h"

namespace specdec {

struct Range {
  int64_t begin, end;
};

// Stage by stage, each thread takes of its things until none are left, then of those that others
// have left, and then waits until all are done. It does not wait for the other threads: one that has
// lost its core to another process holds up the stages by what it has begun alone, and passes over
// those that are done when it is back.
//
// Threads may be on cores that share no cache, where a line takes 200 ns from one to the other, as
// long as many a stage. So what they wait for is one number, that of things done, which only grows
// and to which each thread adds once in most stages; and they look for what others have left only
// when those have had a moment to be through.
//
// Waiting threads stay awake for a moment, which nearly always is enough, and then sleep. OpenMP's
// stay awake for some 15 ms: where other processes want the cores, that keeps from running the very
// thread that is waited for, at each of the some 300 stages of a forward pass.
class Meeting {
 public:
  static constexpr int kCountBits = 24;
  static constexpr int64_t kMostThings = (int64_t{1} << kCountBits) - 1;  // of a stage

  explicit Meeting(int64_t size) : members_(size) {}

  // Brings thread `index` to the next stage, of `total` things. Whether that is still open.
  bool enter(int64_t index, int64_t total) {
    Member& member = members_[index];
    ++member.stage;
    member.end += static_cast<uint32_t>(total);
    return !is_over(index);
  }

  // Whether all things of the stage that thread `index` is in are done, and seen by it.
  bool is_over(int64_t index) const {
    return has_reached(done_.load(std::memory_order_acquire), members_[index].end);
  }

  // Takes, for thread `index` in the stage that it is in, one of the `count` things that are
  // `owner`'s: the first that is left, or the last for another than the owner. Returns its place
  // among them, or -1 when none are left.
  int64_t take(int64_t index, int64_t owner, int64_t count) {
    const uint64_t untaken = uint64_t{members_[index].stage} << kStageShift;
    std::atomic<uint64_t>& taken = members_[owner].taken;
    // Whoever changed the word had seen its stage open: having seen that word, so has this thread.
    uint64_t seen = taken.load(std::memory_order_acquire), now;
    int64_t first, behind;  // how many were taken at either end
    do {
      now = seen;
      if (seen >> kStageShift != untaken >> kStageShift) {
        // Of another stage. If this one is over, nothing is left; and if it ends before the word is
        // exchanged, then somebody will have changed the word.
        if (is_over(index)) return -1;
        now = untaken;
      }
      first = now & kCountMask, behind = now >> kCountBits & kCountMask;
      if (first + behind >= count) return -1;
      now += owner == index ? 1 : uint64_t{1} << kCountBits;
    } while (!taken.compare_exchange_weak(seen, now, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return owner == index ? first : count - 1 - behind;
  }

  // Thread `index` has done `count` more things of its stage, and what it wrote for them will be seen
  // by all that see the stage over. Whether it is.
  bool add(int64_t index, int64_t count) {
    const auto more = static_cast<uint32_t>(count);
    if (done_.fetch_add(more, std::memory_order_seq_cst) + more != members_[index].end) return false;
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &done_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
    return true;
  }

  // Waits a moment for the end of thread `index`'s stage, less than most things take. Whether it came.
  bool await_moment(int64_t index) const {
    return await_checks(kChecksOfMoment, [&] { return is_over(index); });
  }

  // Waits for the end of thread `index`'s stage.
  void await(int64_t index) {
    if (await_awake(kAwake, kChecksPerYield, [&] { return is_over(index); })) return;
    // No wake-up can be lost: either the last thread sees the sleeper, or the kernel sees that the
    // word has changed.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t end = members_[index].end;
    for (uint32_t done; !has_reached(done = done_.load(std::memory_order_seq_cst), end);) {
      syscall(SYS_futex, &done_, FUTEX_WAIT_PRIVATE, done, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr auto kAwake = std::chrono::microseconds(50);
  static constexpr int kChecksPerYield = 64, kChecksOfMoment = 20;
  static constexpr int kStageShift = 2 * kCountBits;
  static constexpr uint64_t kCountMask = kMostThings;

  struct Member {
    // How many of the thread's things are taken at their beginning, how many at their end, and in
    // which stage: its last 16 bits, which come again after more stages than a pass has.
    alignas(128) std::atomic<uint64_t> taken{0};
    // Where the thread is, and how many things are done when all of that stage and those before are.
    alignas(128) uint32_t stage = 0;
    uint32_t end = 0;
  };

  // Things of all stages; wraps around, so a thread must not be 2^31 of them behind.
  alignas(128) std::atomic<uint32_t> done_{0};
  alignas(128) std::atomic<uint32_t> sleepers_{0};
  alignas(128) std::vector<Member> members_;
};

}  // namespace specdec
