// Where the threads of one kernel wait for each other, and divide work.
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

// A barrier that stays awake for a moment, in which the others nearly always come, and then sleeps.
// OpenMP's stays awake for some 15 ms: where other processes want the cores, that keeps from
// running the very thread that is waited for, at each of the some 300 barriers of a forward pass.
class Meeting {
 public:
  explicit Meeting(int64_t size) : taken_(size) {}

  // Thread `index` comes. Returns when `size` have; all that they wrote before is then seen by all.
  void wait(int64_t index, int64_t size) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    // Nobody takes by these counts any more: they were of the round before.
    taken_[index].counts[(round + 1) % 2].store(0, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
      }
      return;
    }
    if (await_briefly(round)) return;
    // No wake-up can be lost: either the last thread sees the sleeper, or the kernel sees that the
    // word has changed.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) {
      syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Takes one of the `count` things that thread `owner` has since the last barrier, from their
  // beginning or from their end; returns its index, or -1 when none are left.
  int64_t take(int64_t owner, int64_t count, bool from_end) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    std::atomic<uint64_t>& taken = taken_[owner].counts[round % 2];
    uint64_t seen = taken.load(std::memory_order_relaxed);
    int64_t first, behind;  // how many were taken at either end
    do {
      first = seen % kFromEnd, behind = seen / kFromEnd;
      if (first + behind >= count) return -1;
    } while (!taken.compare_exchange_weak(seen, seen + (from_end ? kFromEnd : 1),
                                          std::memory_order_relaxed));
    return from_end ? count - 1 - behind : first;
  }

 private:
  static constexpr auto kAwake = std::chrono::microseconds(50);
  static constexpr int kChecksPerYield = 64;
  static constexpr uint64_t kFromEnd = uint64_t{1} << 32;

  // How many of a thread's things are taken at their beginning, and times kFromEnd at their end; in
  // even rounds and in odd ones.
  struct alignas(128) Taken {
    std::atomic<uint64_t> counts[2];
  };

  alignas(128) std::atomic<int64_t> arrived_{0};
  alignas(128) std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> sleepers_{0};
  alignas(128) std::vector<Taken> taken_;

  bool await_briefly(uint32_t round) const {
    const auto end = std::chrono::steady_clock::now() + kAwake;
    do {
      for (int i = 0; i < kChecksPerYield; ++i) {
        if (round_.load(std::memory_order_acquire) != round) return true;
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
