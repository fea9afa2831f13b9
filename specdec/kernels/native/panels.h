// How the weights of a matrix lie in memory.
//
// A panel holds kPanel outputs: for each input in turn, the weights of all of them side by side. A
// kernel that walks down a few panels at once reads as many streams in order, which is what
// hardware prefetching follows best. The last panel is filled up with zeros.
#pragma once

#include "matrix.h"

namespace specdec {

constexpr int64_t kPanel = 16;  // outputs; in float32 a cache line

inline int64_t num_panels(const Matrix& matrix) {
  return (matrix.out_features + kPanel - 1) / kPanel;
}

}  // namespace specdec
