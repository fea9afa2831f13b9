#include "matrix.h"

#include "float_product.h"
#include "int8_product.h"
#include "scratch.h"

namespace specdec {
namespace {

bool is_int8(const Matrix& matrix) {
  return matrix.format == Format::kInt8 || matrix.format == Format::kW8A8;
}

}  // namespace

int64_t scratch_bytes(const Matrix& matrix, int64_t rows) {
  return is_int8(matrix) ? int8_scratch_bytes(matrix, rows) : float_scratch_bytes(matrix, rows);
}

void multiply(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
              int64_t y_stride, Store store, void* scratch, Team team) {
  if (is_int8(matrix)) {
    multiply_int8(matrix, x, x_stride, rows, y, y_stride, store, scratch, team);
  } else {
    multiply_floats(matrix, x, x_stride, rows, y, y_stride, store, scratch, team);
  }
}

}  // namespace specdec

// See `multiply`; a team of `num_threads`, in a parallel region of its own. False where there is no
// memory for it.
SPECDEC_EXPORT bool specdec_multiply(const specdec::Matrix* matrix, const float* x,
                                     int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                                     bool adds, int32_t num_threads) {
  const auto store = adds ? specdec::Store::kAdd : specdec::Store::kWrite;
  const specdec::Scratch scratch(specdec::scratch_bytes(*matrix, rows));
  if (!scratch.is_there()) return false;
  specdec::run_team(num_threads, [&](specdec::Team team) {
    specdec::multiply(*matrix, x, x_stride, rows, y, y_stride, store, scratch.begin(), team);
  });
  return true;
}
