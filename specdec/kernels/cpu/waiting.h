// How threads and ranks wait for each other: for counters that only grow, and awake at first.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

namespace specdec {

// Of a counter that wraps around, less than 2^31 from `wanted`.
inline bool has_reached(uint32_t count, uint32_t wanted) {
  return static_cast<int32_t>(count - wanted) >= 0;
}

// Lets the core do something better than guess that a loop of checks goes on.
inline void pause_in_loop() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Checks so many times whether it has come.
template <typename Check>
bool await_checks(int count, Check has_come) {
  for (int i = 0; i < count; ++i) {
    if (has_come()) return true;
    pause_in_loop();
  }
  return false;
}

// Stays awake for `limit` in case it is about to come; others may have the core between checks.
template <typename Check>
bool await_awake(std::chrono::steady_clock::duration limit, int checks_per_yield, Check has_come) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    if (await_checks(checks_per_yield, has_come)) return true;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return has_come();
}

}  // namespace specdec
