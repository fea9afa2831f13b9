// Packs rows of a checkpoint's matrix into panels, and gathers rows from them.

#include <algorithm>

#include "gemm/packed_layout.h"
#include "gemm/quantize_rows.h"

namespace specdec {
namespace {

// Pack the rows of `packed_rows` that belong to the panel. The offset makes 8-bit integers
// unsigned.
template <class Element, Element kOffset>
void pack_panel(const Matrix& matrix, int64_t panel, const Element* rows, Range packed_rows) {
  const PackedLayout layout(matrix.format, matrix.in_features);
  const int64_t begin = std::max(panel * kPanelOutputs, packed_rows.begin);
  const int64_t end = std::min(panel * kPanelOutputs + kPanelOutputs, packed_rows.end);
  auto* target = static_cast<Element*>(const_cast<void*>(matrix.packed));
  for (int64_t input = 0; input < matrix.in_features; ++input) {
    for (int64_t row = begin; row < end; ++row) {
      const Element value = rows[(row - packed_rows.begin) * matrix.in_features + input];
      target[layout.offset(row, input)] = static_cast<Element>(value + kOffset);
    }
  }
}

template <class Element, Element kOffset = 0>
void pack(const Matrix& matrix, const void* rows, Range packed_rows, int num_threads) {
  const int64_t begin = packed_rows.begin / kPanelOutputs;
  const int64_t end = (packed_rows.end + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t panel = begin; panel < end; ++panel) {
    pack_panel<Element, kOffset>(matrix, panel, static_cast<const Element*>(rows), packed_rows);
  }
}

template <class Element>
bool gather_rows(const Matrix& matrix, const int64_t* rows, int64_t count, void* target) {
  const PackedLayout layout(matrix.format, matrix.in_features);
  const auto is_row = [&](int64_t row) { return 0 <= row && row < matrix.out_features; };
  if (!std::all_of(rows, rows + count, is_row)) return false;
  const auto* source = static_cast<const Element*>(matrix.packed);
  auto* copy = static_cast<Element*>(target);
  for (int64_t index = 0; index < count; ++index) {
    for (int64_t input = 0; input < matrix.in_features; ++input) {
      *copy++ = source[layout.offset(rows[index], input)];
    }
  }
  return true;
}

}  // namespace
}  // namespace specdec

// Pack `count` rows of the matrix, from row `first` on, with `num_threads` threads.
// rows: [count, in_features] in the matrix's format, 8-bit integers signed.
SPECDEC_EXPORT void specdec_pack_rows(const specdec::Matrix* matrix, const void* rows,
                                      int64_t first, int64_t count, int32_t num_threads) {
  using specdec::pack;
  const specdec::Range packed_rows = {first, first + count};
  switch (matrix->format) {
    case specdec::Format::kFloat32:
      return pack<uint32_t>(*matrix, rows, packed_rows, num_threads);
    case specdec::Format::kBFloat16:
    case specdec::Format::kFloat16:
    case specdec::Format::kShortFloat32:
      return pack<uint16_t>(*matrix, rows, packed_rows, num_threads);
    case specdec::Format::kInt8:
    case specdec::Format::kW8A8:
      return pack<uint8_t, specdec::kWeightOffset>(*matrix, rows, packed_rows, num_threads);
  }
}

// Copy rows of a floating-point matrix to target [count, in_features], in the matrix's format.
// Return false, and copy nothing, if an index is out of range.
SPECDEC_EXPORT bool specdec_gather_rows(const specdec::Matrix* matrix, const int64_t* rows,
                                        int64_t count, void* target) {
  if (matrix->format == specdec::Format::kFloat32) {
    return specdec::gather_rows<uint32_t>(*matrix, rows, count, target);
  }
  return specdec::gather_rows<uint16_t>(*matrix, rows, count, target);
}

// Return the size of the packed weights in bytes.
SPECDEC_EXPORT int64_t specdec_packed_bytes(const specdec::Matrix* matrix) {
  const specdec::PackedLayout layout(matrix->format, matrix->in_features);
  return specdec::num_panels(*matrix) * layout.panel_elements *
         specdec::bytes_per_weight(matrix->format);
}
