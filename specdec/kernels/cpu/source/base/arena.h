// Division of one block of memory among the buffers of a call.
#pragma once

#include <cstdint>

#include "base/simd_math.h"

namespace specdec {

// Bump allocator over one block of memory; each allocation starts at a cache line. Without memory,
// only counts bytes.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(static_cast<char*>(memory)) {}

  void* allocate(int64_t bytes) {
    void* result = begin_ ? begin_ + used_ : nullptr;
    used_ += round_up(bytes, 64);
    return result;
  }
  float* allocate_floats(int64_t count) {
    return static_cast<float*>(allocate(count * sizeof(float)));
  }
  int64_t used() const { return used_; }

  // Return the memory after all allocations.
  void* rest() const { return begin_ ? begin_ + used_ : nullptr; }

 private:
  char* begin_;
  int64_t used_ = 0;
};

}  // namespace specdec
