// The threads that run one kernel together, inside one OpenMP parallel region.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace specdec {

struct Range {
  int64_t begin, end;
};

struct Team {
  int64_t index, size;

  static Team current() { return {omp_get_thread_num(), omp_get_num_threads()}; }

  // This thread's part of `count` things; the parts differ by one at most.
  Range share(int64_t count) const {
    return {index * count / size, (index + 1) * count / size};
  }

  // Waits until every thread is here; all that they wrote before is then seen by all.
  void barrier() const {
#pragma omp barrier
  }
};

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))
