// Packs the rows of a checkpoint's matrix into panels, and finds them there again.

#include <algorithm>
#include <cstring>

#include "panels.h"

namespace specdec {
namespace {

template <class Element>
void pack_panel(const Matrix& matrix, int64_t panel, const Element* rows, Range given) {
  const int64_t first = panel * kPanel, inputs = matrix.in_features;
  const Range own = {std::max(first, given.begin), std::min(first + kPanel, given.end)};
  auto* target = static_cast<Element*>(const_cast<void*>(matrix.panels)) + first * inputs;
  for (int64_t input = 0; input < inputs; ++input) {
    for (int64_t row = own.begin; row < own.end; ++row) {
      target[input * kPanel + row - first] = rows[(row - given.begin) * inputs + input];
    }
  }
}

template <class Element>
void pack(const Matrix& matrix, const void* rows, Range given) {
  const int64_t begin = given.begin / kPanel, end = (given.end + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t panel = begin; panel < end; ++panel) {
    pack_panel(matrix, panel, static_cast<const Element*>(rows), given);
  }
}

template <class Element>
void copy_row(const Matrix& matrix, int64_t row, Element* target) {
  const int64_t panel = row / kPanel, inputs = matrix.in_features;
  const auto* source = static_cast<const Element*>(matrix.panels) + panel * kPanel * inputs;
  for (int64_t input = 0; input < inputs; ++input) {
    target[input] = source[input * kPanel + row % kPanel];
  }
}

template <class Element>
void copy_rows(const Matrix& matrix, const int64_t* rows, int64_t count, void* target) {
  for (int64_t index = 0; index < count; ++index) {
    copy_row(matrix, rows[index], static_cast<Element*>(target) + index * matrix.in_features);
  }
}

}  // namespace
}  // namespace specdec

// Writes `count` rows of the matrix, from row `first` on, into its panels, which begin as zeros.
// rows: [count, in_features] in the matrix's format.
SPECDEC_EXPORT void specdec_pack_rows(const specdec::Matrix* matrix, const void* rows,
                                      int64_t first, int64_t count) {
  const specdec::Range given = {first, first + count};
  if (matrix->format == specdec::Format::kFloat32) {
    specdec::pack<float>(*matrix, rows, given);
  } else {
    specdec::pack<uint16_t>(*matrix, rows, given);
  }
}

// Copies rows of the matrix, in its format: target is [count, in_features].
SPECDEC_EXPORT void specdec_rows_of(const specdec::Matrix* matrix, const int64_t* rows,
                                    int64_t count, void* target) {
  if (matrix->format == specdec::Format::kFloat32) {
    specdec::copy_rows<float>(*matrix, rows, count, target);
  } else {
    specdec::copy_rows<uint16_t>(*matrix, rows, count, target);
  }
}
