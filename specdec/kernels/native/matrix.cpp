#include "matrix.h"

#include <cstdlib>
#include <memory>

#include "float_product.h"
#include "int8_product.h"
#include "lanes.h"

namespace specdec {
namespace {

bool is_int8(const Matrix& matrix) {
  return matrix.format == Format::kInt8 || matrix.format == Format::kW8A8;
}

constexpr int64_t kAlignment = 64;  // of scratch memory, in bytes

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

// See `multiply`; a team of `num_threads`, in a parallel region of its own.
SPECDEC_EXPORT void specdec_multiply(const specdec::Matrix* matrix, const float* x,
                                     int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                                     bool adds, int32_t num_threads) {
  const auto store = adds ? specdec::Store::kAdd : specdec::Store::kWrite;
  const int64_t bytes = specdec::round_up(specdec::scratch_bytes(*matrix, rows), specdec::kAlignment);
  const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(specdec::kAlignment, bytes), std::free);
  specdec::run_team(num_threads, [&](specdec::Team team) {
    specdec::multiply(*matrix, x, x_stride, rows, y, y_stride, store, scratch.get(), team);
  });
}
