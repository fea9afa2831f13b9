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

bool rounds_rows(const Matrix& matrix) {
  return is_int8(matrix) || matrix.format == Format::kBFloat16;
}

void round_rows(const Matrix& matrix, const Rows& rows, Range own) {
  if (is_int8(matrix)) {
    round_to_digits(matrix, rows, own);
  } else if (matrix.format == Format::kBFloat16) {
    round_to_bfloat16(matrix, rows, own);
  }
}

void round_rows(const Matrix& matrix, const Rows& rows, Team team) {
  if (!rounds_rows(matrix)) return;
  team.divide(rows.count, [&](Range own) { round_rows(matrix, rows, own); });
}

void multiply(const Matrix& matrix, const Rows& rows, float* y, int64_t y_stride, Store store,
              Team team) {
  if (is_int8(matrix)) {
    multiply_int8(matrix, rows, y, y_stride, store, team);
  } else {
    multiply_floats(matrix, rows, y, y_stride, store, team);
  }
}

}  // namespace specdec

// See `multiply`, of rows that are yet to be rounded; a team of `num_threads`, in a parallel region
// of its own. False where there is no memory for it.
SPECDEC_EXPORT bool specdec_multiply(const specdec::Matrix* matrix, const float* x,
                                     int64_t x_stride, int64_t num_rows, float* y,
                                     int64_t y_stride, bool adds, int32_t num_threads) {
  const auto store = adds ? specdec::Store::kAdd : specdec::Store::kWrite;
  const specdec::Scratch scratch(specdec::scratch_bytes(*matrix, num_rows));
  if (!scratch.is_there()) return false;
  const specdec::Rows rows = {x, x_stride, num_rows, scratch.begin()};
  specdec::run_team(num_threads, [&](specdec::Team team) {
    specdec::round_rows(*matrix, rows, team);
    specdec::multiply(*matrix, rows, y, y_stride, store, team);
  });
  return true;
}
