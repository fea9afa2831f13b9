// Packed layout of weights.
//
// A panel holds kPanelOutputs outputs, step by step. A step holds the weights of a few inputs, as
// many as one instruction takes, for all outputs of the panel; the weights of one output are
// adjacent. A micro-kernel that processes a few panels reads as many sequential streams, which
// hardware prefetchers handle best. The last panel and the last step are padded with zeros.
#pragma once

#include "gemm/matrix.h"

namespace specdec {

constexpr int64_t kPanelOutputs = 16;  // one step is a cache line; in float16 half of one

constexpr int64_t inputs_per_step(Format format) {
  switch (format) {
    case Format::kBFloat16:
    case Format::kShortFloat32:
      return 2;
    case Format::kInt8:
    case Format::kW8A8:
      return 4;
    default:
      return 1;
  }
}

inline int64_t num_panels(const Matrix& matrix) {
  return (matrix.out_features + kPanelOutputs - 1) / kPanelOutputs;
}

// Return the number of steps per panel.
inline int64_t num_steps(Format format, int64_t in_features) {
  const int64_t inputs = inputs_per_step(format);
  return (in_features + inputs - 1) / inputs;
}

inline int64_t num_steps(const Matrix& matrix) {
  return num_steps(matrix.format, matrix.in_features);
}

// Position of a weight in the packed matrix, in elements.
struct PackedLayout {
  int64_t inputs, panel_elements;  // per step (a power of two); from one panel to the next

  PackedLayout(Format format, int64_t in_features)
      : inputs(inputs_per_step(format)),
        panel_elements(num_steps(format, in_features) * inputs * kPanelOutputs) {}

  int64_t offset(int64_t output, int64_t input) const {
    const int64_t remainder = input & (inputs - 1), step = (input - remainder) * kPanelOutputs;
    return output / kPanelOutputs * panel_elements + step + output % kPanelOutputs * inputs +
           remainder;
  }
};

inline int64_t bytes_per_weight(Format format) {
  switch (format) {
    case Format::kFloat32:
      return 4;
    case Format::kInt8:
    case Format::kW8A8:
      return 1;
    default:
      return 2;
  }
}

// Return the first output of the panel with an output.
constexpr int64_t first_of_panel(int64_t output) {
  return output / kPanelOutputs * kPanelOutputs;
}

// Return the outputs of a matrix from `first` on, which must be the first one of a panel.
inline Matrix outputs_from(Matrix matrix, int64_t first) {
  const int64_t elements = PackedLayout(matrix.format, matrix.in_features).offset(first, 0);
  matrix.packed =
      static_cast<const char*>(matrix.packed) + elements * bytes_per_weight(matrix.format);
  matrix.out_features -= first;
  if (matrix.scales) matrix.scales += first;
  if (matrix.bias) matrix.bias += first;
  return matrix;
}

}  // namespace specdec
