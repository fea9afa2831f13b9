// GEMM of packed matrices: selects the kernel of a format.
#include "gemm/matrix.h"

#include "base/scratch.h"
#include "gemm/gemm_float.h"
#include "gemm/gemm_int8.h"

namespace specdec {
namespace {

bool is_int8(const Matrix& matrix) {
  return matrix.format == Format::kInt8 || matrix.format == Format::kW8A8;
}

}  // namespace

int64_t scratch_bytes(const Matrix& matrix, int64_t rows) {
  return is_int8(matrix) ? int8_scratch_bytes(matrix, rows) : float_scratch_bytes(matrix, rows);
}

bool quantizes_rows(const Matrix& matrix) {
  return is_int8(matrix) || matrix.format == Format::kBFloat16;
}

void quantize_rows(const Matrix& matrix, const Activations& rows, Range own) {
  if (is_int8(matrix)) {
    quantize_to_int8(matrix, rows, own);
  } else if (matrix.format == Format::kBFloat16) {
    convert_to_bfloat16(matrix, rows, own);
  }
}

void quantize_rows(const Matrix& matrix, const Activations& rows, ThreadTeam team) {
  if (!quantizes_rows(matrix)) return;
  team.parallel_for_ranges(rows.count, [&](Range own) { quantize_rows(matrix, rows, own); });
}

void gemm(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride, Store store,
          ThreadTeam team) {
  if (is_int8(matrix)) {
    gemm_int8(matrix, rows, y, y_stride, store, team);
  } else {
    gemm_float(matrix, rows, y, y_stride, store, team);
  }
}

}  // namespace specdec

// Quantize the rows and compute `gemm`, in a parallel region of `num_threads` threads. x:
// [num_rows, in_features]; y: [num_rows, out_features]. Return false when no memory is available.
SPECDEC_EXPORT bool specdec_gemm(const specdec::Matrix* matrix, const float* x, int64_t x_stride,
                                 int64_t num_rows, float* y, int64_t y_stride, bool adds,
                                 int32_t num_threads) {
  const auto store = adds ? specdec::Store::kAccumulate : specdec::Store::kOverwrite;
  const specdec::Scratch scratch(specdec::scratch_bytes(*matrix, num_rows));
  if (!scratch.is_allocated()) return false;
  const specdec::Activations rows = {x, x_stride, num_rows, scratch.begin()};
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) {
    specdec::quantize_rows(*matrix, rows, team);
    specdec::gemm(*matrix, rows, y, y_stride, store, team);
  });
  return true;
}
