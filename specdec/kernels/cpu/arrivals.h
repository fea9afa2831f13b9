// How ranks wait for each other: words in shared memory that say how far each of them has come.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "waiting.h"

namespace specdec {

using Clock = std::chrono::steady_clock;

// One rank's progress, on cache lines of its own. All zeros to begin with.
struct alignas(128) Arrival {
  std::atomic<uint32_t> round;     // of the last part that the rank has written; wraps around
  std::atomic<uint32_t> sleepers;  // threads of other ranks to wake when it changes
  int64_t claims[2];               // what it takes the collective of an even or odd round to be

  bool has_reached(uint32_t wanted) const {
    return specdec::has_reached(round.load(std::memory_order_acquire), wanted);
  }

  // Publishes all that this rank has written for `reached`. No wake-up can be lost: either the
  // sleeper is seen here, or the kernel sees there that the word is not what it slept on.
  void announce(uint32_t reached) {
    round.store(reached, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
  }

  // Stays awake for a moment in case the rank is about to come; others may have the core.
  bool await_briefly(uint32_t wanted, Clock::duration limit) const {
    return await_awake(limit, kChecksPerYield, [&] { return has_reached(wanted); });
  }

  // Sleeps until the rank comes, or for `limit`; may return early without reason.
  bool await_asleep(uint32_t wanted, std::chrono::nanoseconds limit) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = round.load(std::memory_order_seq_cst);
    if (!specdec::has_reached(seen, wanted)) {
      const timespec timeout = {limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
      syscall(SYS_futex, &round, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return has_reached(wanted);
  }

 private:
  static constexpr int kChecksPerYield = 32;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

}  // namespace specdec
