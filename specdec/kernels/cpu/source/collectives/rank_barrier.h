// Barrier between ranks (processes): futex words in shared memory that hold the progress of each
// rank.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "threads/spin_wait.h"

namespace specdec {

using Clock = std::chrono::steady_clock;

// Progress of one rank, on separate cache lines. Initialized to zeros.
struct alignas(128) RankProgress {
  std::atomic<uint32_t> round;         // last round that the rank has written; wraps around
  std::atomic<uint32_t> num_sleepers;  // threads of other ranks that sleep on `round`
  int64_t signatures[2];               // identify the collective of an even and an odd round

  bool has_reached(uint32_t wanted) const {
    return specdec::has_reached(round.load(std::memory_order_acquire), wanted);
  }

  // Publish everything that this rank wrote for round `reached`. No wake-up is lost: either the
  // sleeper is seen here, or its futex call sees that the word has changed.
  void publish(uint32_t reached) {
    round.store(reached, std::memory_order_seq_cst);
    if (num_sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
  }

  // Spin for at most `limit`; return whether the rank reached round `wanted`. Yields the core
  // between polls.
  bool spin_wait(uint32_t wanted, Clock::duration limit) const {
    return spin_for(limit, kChecksPerYield, [&] { return has_reached(wanted); });
  }

  // Sleep until the rank publishes a round, or for `limit`; may wake up spuriously. Return whether
  // the rank reached round `wanted`.
  bool futex_wait(uint32_t wanted, std::chrono::nanoseconds limit) {
    num_sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = round.load(std::memory_order_seq_cst);
    if (!specdec::has_reached(seen, wanted)) {
      const timespec timeout = {limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
      syscall(SYS_futex, &round, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    }
    num_sleepers.fetch_sub(1, std::memory_order_relaxed);
    return has_reached(wanted);
  }

 private:
  static constexpr int kChecksPerYield = 32;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

}  // namespace specdec
