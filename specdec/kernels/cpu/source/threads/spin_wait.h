// Spin-wait primitives for counters that only grow; shared by the thread barrier and the rank
// barrier.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

namespace specdec {

// Return whether `count` has reached `wanted`. The counter wraps around, so the two must be less
// than 2^31 apart.
inline bool has_reached(uint32_t count, uint32_t wanted) {
  return static_cast<int32_t>(count - wanted) >= 0;
}

// Hint to the core that this is a spin loop, so that it does not speculate on the loop continuing.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Poll is_ready() at most `count` times; return whether it became true.
template <typename Check>
bool spin_checks(int count, Check is_ready) {
  for (int i = 0; i < count; ++i) {
    if (is_ready()) return true;
    cpu_relax();
  }
  return false;
}

// Spin until is_ready() or for `limit`; return whether it became true. Yields the core to other
// threads between batches of polls.
template <typename Check>
bool spin_for(std::chrono::steady_clock::duration limit, int checks_per_yield, Check is_ready) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    if (spin_checks(checks_per_yield, is_ready)) return true;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return is_ready();
}

}  // namespace specdec
