// Temporary memory of one call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/simd_math.h"

namespace specdec {

// Cache-line-aligned allocation; null for 0 bytes.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : bytes_(bytes),
        memory_(bytes ? std::aligned_alloc(kLine, round_up(bytes, kLine)) : nullptr, std::free) {}

  bool is_allocated() const { return memory_ || bytes_ == 0; }
  void* begin() const { return memory_.get(); }

 private:
  static constexpr int64_t kLine = 64;
  int64_t bytes_;
  std::unique_ptr<void, void (*)(void*)> memory_;
};

}  // namespace specdec
